"""The job that builds the view tables from `ledger`: registries, mailbox and `stream_entries`.

Reads: the table `ledger`, commit by commit, by its change data feed.
Owns: the view tables, one writer at a time (`WriterClaim`).
Guarantees: each row is the last state of its key. A registry is never behind the offsets that the newest commit
of `stream_entries` names. Changes that are applied again have no effect.
On restart: continues from the progress in the newest commit of `stream_entries`. Changes that are read twice
are recognised by `last_offset`. If a view table is missing, all are first rebuilt from the ledger.

delta-rs reads and merges, in this process (view_tables.py, decisions 0009 and 0012).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from jobs.driver.programs import BackgroundThread, nobody_else_writes
from jobs.ledger.ledger_table import create_ledger
from jobs.rebuild_views import rebuild
from jobs.views.view_changes import CHANGE_COLUMNS, changes_of, newest
from jobs.views.view_tables import are_complete, open_tables
from schemas.settings.settings import Settings
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.delta_files import has_rows, is_table
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import ViewProgress, read_progress
from trunkline_agent.errors import Refused

# The number of rows that a round should read. The number of commits in a round is adapted to it.
_ROUND_ROWS = 50_000


class ViewBuilder:
    """The writer that applies the ledger's new commits to the view tables. Only one thread may call `build`.

    Attributes:
        lock: Held while tables are written. Maintenance takes it to work between rounds.
        tables: The view tables by name.
    """

    def __init__(self, settings: Settings) -> None:
        self.lock = threading.Lock()
        self.tables = open_tables(settings)
        self._ledger = DeltaTable(settings.table_path(LEDGER))
        self._span = 1

    @property
    def progress(self) -> ViewProgress:
        """The progress of the view tables: the offsets and the ledger version that they contain."""
        return self.tables[STREAM_ENTRIES].progress

    def build(self) -> int:
        """Apply the next commits of the ledger to the view tables, and return the number of these commits.

        0 means that the views already had all commits of the ledger. One call reads as many commits as have
        about 50,000 rows together, or one commit if it has more rows.

        Raises:
            Refused: The commits cannot be read, for example because maintenance has removed them. The views
                must be rebuilt (jobs/rebuild_views.py).
        """
        # Opening the table anew would read the names of all of its files in each round.
        self._ledger.update_incremental()
        seen = self.progress.ledger_version
        last = min(self._ledger.version(), seen + self._span)
        commits = last - seen
        if commits <= 0:
            return 0
        rows = read_changes(self._ledger, seen + 1, last)
        if rows.num_rows:
            self._apply(rows, last)
        else:
            # Commits without rows are noted, too: they are removed from the log, and a restart would read them.
            with self.lock:
                self.tables[STREAM_ENTRIES].note(ViewProgress(self.progress.offsets, last))
        self._span = 2 * commits if rows.num_rows <= _ROUND_ROWS // 2 else max(1, commits // 2)
        return commits

    def close(self) -> None:
        """Close the indexes of the tables, so that another object can open the tables for writing."""
        for table in self.tables.values():
            table.close()

    def _apply(self, rows: pa.Table, version: int) -> None:
        """Apply changes to the registries first, and last, with the progress, to the entries."""
        changes = changes_of(rows)
        with self.lock:
            progress = ViewProgress(newest(self.progress.offsets, changes.next_offsets), version)
            for name, table in self.tables.items():
                table.apply(changes.tables[name], progress if name == STREAM_ENTRIES else None)


class ViewThread(BackgroundThread):
    """A thread that brings the views up to the ledger every `views.interval_ms` milliseconds.

    The thread runs from `start` until `stop` or until its first error.

    Attributes:
        is_ready: Whether the views have once reached the ledger's end since the start.
        failure: The error that ended the thread, as text. None: there was no error.
    """

    def __init__(self, settings: Settings, builder: ViewBuilder) -> None:
        super().__init__("build_views")
        self._builder = builder
        self._interval_s = settings.views.interval_ms / 1000
        self.is_ready = False
        self.failure: str | None = None

    def stop(self, timeout_s: float | None = None) -> None:
        """Ask the thread to end after its current round, and wait for it.

        Args:
            timeout_s: Wait at most this many seconds. None: no limit.
        """
        super().stop(timeout_s)

    def _run(self) -> None:
        pause = 0.0
        try:
            while not self._stopping.wait(pause):
                began = time.monotonic()
                is_behind = self._builder.build() > 0
                self.is_ready = self.is_ready or not is_behind
                pause = max(0.0, self._interval_s - (time.monotonic() - began))
        except Exception as error:  # noqa: BLE001  the driver reports it and ends
            self.failure = f"{type(error).__name__}: {error}"


def read_changes(ledger: DeltaTable, first: int, last: int) -> pa.Table:
    """Return the rows that the ledger's commits `first` to `last` added, both inclusive, in no order.

    The rows have the columns that `changes_of` needs (CHANGE_COLUMNS).

    Raises:
        Refused: The commits cannot be read, for example because maintenance has removed them.
    """
    # delta-rs 1.6.6 puts the names of columns into SQL without quotes, and one of them is a keyword.
    columns = [f'"{name}"' for name in CHANGE_COLUMNS]
    try:
        rows = pa.table(ledger.load_cdf(starting_version=first, ending_version=last, columns=columns))
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise Refused(
            f"the ledger's commits {first} to {last} cannot be read, perhaps because maintenance has removed "
            f"them since the views were built last: build the views anew (jobs/rebuild_views.py). {error}"
        ) from error
    # delta-rs returns view types, for which Arrow has few functions.
    return rows.cast(pa.schema([LEDGER_ARROW.field(name) for name in CHANGE_COLUMNS]))


def check_not_ahead(settings: Settings) -> None:
    """Raise Refused if the views have seen a version of the ledger that it does not have.

    Call it before a claim, because each claim adds a version. Missing views are not ahead.
    """
    path, entries = settings.table_path(LEDGER), settings.table_path(STREAM_ENTRIES)
    seen = read_progress(DeltaTable(entries)).ledger_version if is_table(entries) else -1
    if seen > DeltaTable(path).version():
        raise Refused(
            f"the views have seen version {seen} of the ledger {path}, which ends before: put the ledger "
            "back, or build the views anew from the one that is there (jobs/rebuild_views.py)"
        )


def prepare(settings: Settings, check: Callable[[], None] = nobody_else_writes) -> None:
    """Create the ledger and the view tables where they are missing, so that a ViewBuilder can start.

    If a view table is missing, or a rebuild was killed, all of them are built from the ledger.

    Args:
        settings: The settings of the tables.
        check: Raises if this process may not write the tables any more.

    Raises:
        Refused: The views are ahead of the ledger, or cannot be built.
        WrongViewTable: A stored view table has other columns than this version writes.
    """
    create_ledger(settings)
    if are_complete(settings):
        check_not_ahead(settings)
        return
    if has_rows(settings.table_path(LEDGER)):
        text = "build_views: the view tables are not complete; building them from the ledger"
        print(text, file=sys.stderr)
    rebuild(settings, check)


def catch_up(settings: Settings, check: Callable[[], None] = nobody_else_writes) -> None:
    """Apply all commits that the views lack, and return. Missing tables are created first.

    The call blocks until the views are at the ledger's end. If another process may write the views, the caller
    must hold a `WriterClaim`, and pass its `check`.

    Raises:
        Refused: The views are ahead of the ledger, or the ledger's commits can no longer be read.
        WrongViewTable: A stored view table has other columns than this version writes.
    """
    prepare(settings, check)
    builder = ViewBuilder(settings)
    check()
    while builder.build():
        pass
    builder.close()
