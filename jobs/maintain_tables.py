"""Tidies the tables up from inside the streaming driver: few files, no files that nobody reads, a short log.

Reads: the ledger and the view tables.
Owns: nothing; it works as the tables' one writer does, in the same driver: on the views between two
micro-batches, on the ledger beside them.
Guarantees: no row is changed or removed. Files that were replaced are kept for `views.keep_old_files_h`, at
least for an hour, so that a reader that holds a version can finish. What fails is said and tried again at the
next interval; the streams go on.
On restart: nothing to go on from.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable

from jobs.build_views import ViewBuilder
from jobs.ledger.audit_trail import AuditTrail
from jobs.ledger.ledger_table import keep_old_files_h
from schemas.settings.settings import Settings
from schemas.tables.ledger import LEDGER

# Files of the ledger are put together to files of about so much, in two steps: those of a round to a few small
# ones, and these when there are enough for a full one. In one step each round wrote what was not full yet anew.
_FULL_FILE_BYTES: Final = 32 * 1024 * 1024
_SMALL_FILE_BYTES: Final = 2 * 1024 * 1024
_POLL_S: Final = 0.5


def tidy_views(builder: ViewBuilder, keep_h: float) -> None:
    """Compact the view tables, and delete files that were replaced more than `keep_h` hours ago."""
    for table in builder.tables.values():
        with builder.lock:
            table.tidy(keep_h)


def tidy_ledger(settings: Settings, keep_h: int | None = None) -> None:
    """The same for the ledger, whose replaced files are kept as long as its settings say unless `keep_h` says
    otherwise. Appends go on meanwhile: what compaction commits changes no data.
    """
    table = DeltaTable(settings.table_path(LEDGER))
    compact_ledger(table)
    table.vacuum(
        retention_hours=keep_old_files_h(settings) if keep_h is None else keep_h,
        dry_run=False,
        enforce_retention_duration=False,
        full=True,
    )
    table.update_incremental()
    table.create_checkpoint()
    # What the log forgets must be in the chain file.
    AuditTrail(settings).catch_up()
    table.cleanup_metadata()


def compact_ledger(table: DeltaTable) -> None:
    """Put the ledger's small files together, and those of earlier rounds when that makes a full one."""
    sizes = pa.table(table.get_add_actions())["size_bytes"].to_pylist()
    # What the small step mostly leaves alone (both put neighbours together), and the full one takes.
    between = sum(size for size in sizes if _SMALL_FILE_BYTES // 2 <= size < _FULL_FILE_BYTES // 2)
    target = _FULL_FILE_BYTES if between >= _FULL_FILE_BYTES else _SMALL_FILE_BYTES
    # One task at a time: the settling query must find a free core.
    table.optimize.compact(target_size=target, max_concurrent_tasks=1)


class Maintenance:
    """A thread that tidies up every `views.maintenance_interval_s` seconds (0: never), until `stop`."""

    def __init__(self, settings: Settings, builder: ViewBuilder) -> None:
        self._settings = settings
        self._builder = builder
        self._stopping = threading.Event()
        self._tidied: int | None = None
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is anything for it to do."""
        if self._settings.views.maintenance_interval_s > 0:
            self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it after what it is doing."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        interval = self._settings.views.maintenance_interval_s
        while not self._stopping.wait(interval):
            began = time.monotonic()
            try:
                self.tidy()
            except Exception as error:  # noqa: BLE001  the streams matter more; the next round tries again
                if not self._stopping.is_set():
                    print(f"maintain_tables: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                self.rounds += 1
                print(f"maintain_tables: done in {time.monotonic() - began:.1f} s", file=sys.stderr)

    def tidy(self) -> None:
        """One round. An idle ledger is left alone: each round would add commits to its log."""
        path = self._settings.table_path(LEDGER)
        if self._tidied == DeltaTable(path).version():
            return
        tidy_views(self._builder, keep_old_files_h(self._settings))
        tidy_ledger(self._settings)
        self._tidied = DeltaTable(path).version()
