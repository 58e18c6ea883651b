"""Maintenance of the tables inside the streaming driver: it joins files, deletes unused ones, shortens the log.

Reads: the ledger and the view tables.
Owns: no table. It works in the driver of the tables' one writer: on the views between two micro-batches, on the
ledger at the same time as the writer.
Guarantees: no row is changed or removed. Replaced files are kept for `views.keep_old_files_h`, at least for an
hour, so that a reader of an older version can finish. Errors are reported, and the next interval tries again;
the streams go on.
On restart: starts again without any state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable

from jobs.build_views import ViewBuilder
from jobs.driver.programs import BackgroundThread, nobody_else_writes
from jobs.ledger.audit_trail import AuditTrail
from jobs.ledger.ledger_table import keep_old_files_h
from schemas.settings.settings import Settings
from schemas.tables.ledger import LEDGER

# Files of the ledger are joined in two steps: those of a round into a few small ones, and these into a full one
# when there are enough. With a single step, each round would write the last file again until it is full.
_FULL_FILE_BYTES: Final = 32 * 1024 * 1024
_SMALL_FILE_BYTES: Final = 2 * 1024 * 1024


def tidy_views(builder: ViewBuilder, keep_h: float) -> None:
    """Compact each view table, and delete files that were replaced more than `keep_h` hours ago.

    The function holds `builder.lock` while it works on a table. Meanwhile, `builder.build` waits.
    """
    for table in builder.tables.values():
        with builder.lock:
            table.tidy(keep_h)


def tidy_ledger(
    settings: Settings, keep_h: int | None = None, check: Callable[[], None] = nobody_else_writes
) -> None:
    """Compact the ledger, delete its replaced files, and shorten its Delta log.

    Other programs may append meanwhile, because a compaction changes no data. A compaction fails if another
    process claims the ledger meanwhile. Before entries of the log are removed, they are copied into the chain
    file.

    Args:
        settings: The settings of the tables.
        keep_h: Delete files that were replaced more than this many hours ago. None: `views.keep_old_files_h`,
            at least 1.
        check: Raises if this process may not write the tables any more.
    """
    table = DeltaTable(settings.table_path(LEDGER))
    check()
    compact_ledger(table)
    # The compaction has read the table again, perhaps with a claim.
    check()
    table.vacuum(
        retention_hours=keep_old_files_h(settings) if keep_h is None else keep_h,
        dry_run=False,
        enforce_retention_duration=False,
        full=True,
    )
    table.update_incremental()
    table.create_checkpoint()
    # Entries that are removed from the log must be in the chain file.
    trail = AuditTrail(settings)
    trail.catch_up()
    check()
    table.cleanup_metadata()
    trail.merge()


def compact_ledger(table: DeltaTable) -> None:
    """Join small data files of the ledger into larger ones. No row is changed.

    Files of single micro-batches are joined to about 2 MB. When enough of these exist, they are joined to about
    32 MB.
    """
    sizes = pa.table(table.get_add_actions())["size_bytes"].to_pylist()
    # Files that the small step mostly leaves alone, and that the full step joins. Both join neighbours.
    between = sum(size for size in sizes if _SMALL_FILE_BYTES // 2 <= size < _FULL_FILE_BYTES // 2)
    target = _FULL_FILE_BYTES if between >= _FULL_FILE_BYTES else _SMALL_FILE_BYTES
    # One task at a time: the settling query must find a free core.
    table.optimize.compact(target_size=target, max_concurrent_tasks=1)


class Maintenance(BackgroundThread):
    """A thread that maintains the tables every `views.maintenance_interval_s` seconds, until `stop`.

    Errors are printed to stderr, and the next round tries again.

    Args:
        settings: The settings of the tables.
        builder: The writer of the views.
        check: Raises if this process may not write the tables any more.

    Attributes:
        rounds: How many rounds have succeeded.
    """

    def __init__(self, settings: Settings, builder: ViewBuilder, check: Callable[[], None]) -> None:
        super().__init__("maintenance")
        self._check = check
        self._settings = settings
        self._builder = builder
        self._tidied: int | None = None
        self.rounds = 0

    def start(self) -> None:
        """Start the thread. If `views.maintenance_interval_s` is 0, do nothing: there is no maintenance."""
        if self._settings.views.maintenance_interval_s > 0:
            super().start()

    def _run(self) -> None:
        interval = self._settings.views.maintenance_interval_s
        while not self._stopping.wait(interval):
            began = time.monotonic()
            try:
                self.tidy()
            except Exception as error:  # noqa: BLE001  the streams go on; the next round tries again
                if not self._stopping.is_set():
                    print(f"maintain_tables: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                self.rounds += 1
                print(f"maintain_tables: done in {time.monotonic() - began:.1f} s", file=sys.stderr)

    def tidy(self) -> None:
        """Compact the views and the ledger and delete their unused files, unless the ledger is unchanged.

        The ledger is unchanged if it has no commit since the last call of this method has ended. The method
        blocks until all tables are done, and may be called without starting the thread.
        """
        path = self._settings.table_path(LEDGER)
        if self._tidied == DeltaTable(path).version():
            return
        self._check()
        tidy_views(self._builder, keep_old_files_h(self._settings))
        tidy_ledger(self._settings, check=self._check)
        self._tidied = DeltaTable(path).version()
