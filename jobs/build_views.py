"""Builds the view tables out of `ledger`: registries, mailbox and `stream_entries`, by the changes in its rows.

Reads: the table `ledger`, commit by commit, by its change data feed.
Owns: the view tables; one writer at a time, held by a lock (view_lock.py).
Guarantees: each table row is the last state of its key; a registry is never behind the offsets that the
newest commit of `stream_entries` names; what is applied again changes nothing.
On restart: goes on from the progress in the newest commit of `stream_entries`; what is read twice is recognised
by `last_offset`. When a view table is missing, all are first built anew from the ledger.

delta-rs reads and merges, in this process (view_tables.py, decisions 0009 and 0012).
"""

from __future__ import annotations

import sys
import threading
import time

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from jobs.ledger.ledger_table import create_ledger
from jobs.rebuild_views import rebuild
from jobs.views.view_changes import CHANGE_COLUMNS, changes_of
from jobs.views.view_tables import are_complete, open_tables
from schemas.errors import Refused
from schemas.settings.settings import Settings
from schemas.streams.views import STREAM_ENTRIES
from schemas.tables.ledger import LEDGER
from schemas.tables.ledger_arrow import LEDGER_ARROW
from schemas.tables.view_progress import ViewProgress, read_progress

# Rows that a round should read. What a commit holds is not known before, so the number of commits follows.
_ROUND_ROWS = 50_000


class ViewBuilder:
    """Applies the ledger's new commits to the view tables. For one thread.

    `lock` is held while tables are written: maintenance takes it to work between rounds.
    """

    def __init__(self, settings: Settings) -> None:
        self.lock = threading.Lock()
        self.tables = open_tables(settings)
        self._ledger = settings.table_path(LEDGER)
        self._span = 1

    @property
    def progress(self) -> ViewProgress:
        """How far the tables are."""
        return self.tables[STREAM_ENTRIES].progress

    def build(self) -> int:
        """Apply the next commits; returns how many. Raises Refused when they cannot be read any more."""
        ledger, seen = DeltaTable(self._ledger), self.progress.ledger_version
        last = min(ledger.version(), seen + self._span)
        commits = last - seen
        if commits <= 0:
            return 0
        rows = read_changes(ledger, seen + 1, last)
        if rows.num_rows:
            self._apply(rows, last)
        else:
            self._pass_over(last)
        self._span = 2 * commits if rows.num_rows <= _ROUND_ROWS // 2 else max(1, commits // 2)
        return commits

    def _apply(self, rows: pa.Table, version: int) -> None:
        """First to the registries, last, with the progress, to the entries."""
        changes = changes_of(rows)
        with self.lock:
            offsets = dict(self.progress.offsets)
            for partition, offset in changes.next_offsets.items():
                offsets[partition] = max(offset, offsets.get(partition, 0))
            progress = ViewProgress(offsets, version)
            for name, table in self.tables.items():
                table.apply(changes.tables[name], progress if name == STREAM_ENTRIES else None)

    def _pass_over(self, version: int) -> None:
        """Note commits without rows, too: the log is shortened behind them, and the next start would ask for
        them.
        """
        with self.lock:
            self.tables[STREAM_ENTRIES].note(ViewProgress(self.progress.offsets, version))


class ViewThread:
    """Builds the views every `views.interval_ms` milliseconds, until `stop` or a failure."""

    def __init__(self, settings: Settings, builder: ViewBuilder) -> None:
        self._builder = builder
        self._interval_s = settings.views.interval_ms / 1000
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="build_views", daemon=True)
        self.is_ready = False
        """Whether the views have been at the ledger's end."""
        self.failure: str | None = None
        """Why it ended by itself."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End it after what it is doing."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause = 0.0
        try:
            while not self._stopping.wait(pause):
                began = time.monotonic()
                is_behind = self._builder.build() > 0
                self.is_ready = self.is_ready or not is_behind
                pause = max(0.0, self._interval_s - (time.monotonic() - began))
        except Exception as error:  # noqa: BLE001  the driver says it and ends
            self.failure = f"{type(error).__name__}: {error}"


def read_changes(ledger: DeltaTable, first: int, last: int) -> pa.Table:
    """What build_views needs of the rows that the commits `first` to `last` have added. Raises Refused."""
    # The name of a column goes into the SQL of delta-rs 1.6.6 as it stands, and one is a key word there.
    columns = [f'"{name}"' for name in CHANGE_COLUMNS]
    try:
        rows = pa.table(ledger.load_cdf(starting_version=first, ending_version=last, columns=columns))
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise Refused(
            f"the ledger's commits {first} to {last} cannot be read, perhaps because maintenance has removed "
            f"them since the views were built last: build the views anew (jobs/rebuild_views.py). {error}"
        ) from error
    # delta-rs gives view types, for which Arrow has few functions.
    return rows.cast(pa.schema([LEDGER_ARROW.field(name) for name in CHANGE_COLUMNS]))


def prepare(settings: Settings) -> None:
    """Make what must be there before a ViewBuilder: a ledger and all view tables. Raises Refused,
    WrongViewTable.
    """
    create_ledger(settings)
    path = settings.table_path(LEDGER)
    if are_complete(settings):
        seen = read_progress(DeltaTable(settings.table_path(STREAM_ENTRIES))).ledger_version
        if seen > DeltaTable(path).version():
            raise Refused(
                f"the views have seen version {seen} of the ledger {path}, which ends before: put the ledger "
                "back, or build the views anew from the one that is there (jobs/rebuild_views.py)"
            )
    else:
        if DeltaTable(path).version() > 0:
            print(
                "build_views: the view tables are not complete; building them from the ledger", file=sys.stderr
            )
        rebuild(settings)


def catch_up(settings: Settings) -> None:
    """Bring the views to the ledger's end and return. The caller holds the lock, if there may be another
    writer. Raises Refused, WrongViewTable.
    """
    prepare(settings)
    builder = ViewBuilder(settings)
    while builder.build():
        pass
