"""The streaming jobs with the named crash points of `crash_points.py`: around the ledger's commit, between it
and the views', between two tables, while a MERGE or a compaction writes its files, in maintenance, and in tasks
(`crashing_tasks.py`). For spark-submit.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final

from jobs import maintain_tables, run_streams, settle_events
from jobs.build_views import ViewBuilder
from jobs.settling.ledger_sink import LedgerSink
from jobs.views.view_tables import ViewTable
from schemas.settings.settings import load_settings
from tests.faults.prove import crashing_tasks
from tests.faults.prove.crash_points import Points
from tests.faults.prove.store_faults import DISK_FULL, known_stores

_LOOK_S: Final = 0.0002
_FILL_S: Final = 0.02
_FILL_BYTES: Final = bytes(4096)


class DeathBeforeCommit:
    """Kills the process, at the point `name`, when a file appears that was written to a table while this is
    entered, and no commit names it yet.
    """

    def __init__(self, points: Points, name: str, folder: str) -> None:
        self._points, self._name = points, name
        self._folder = Path(folder)
        self._commits = self._folder / "_delta_log"
        self._before, self._commits_before = self._files(), self._count_commits()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> DeathBeforeCommit:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _files(self) -> set[Path]:
        return {file for file in self._folder.rglob("*.parquet") if file.parent != self._commits}

    def _count_commits(self) -> int:
        return len(list(self._commits.glob("*.json")))

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            if self._files() - self._before:
                # If the commit was quicker than this look, it would be a death after it: try the next one.
                if self._count_commits() == self._commits_before:
                    self._points.die(self._name)
                return


def dying_before_commit(points: Points, name: str, table: ViewTable) -> AbstractContextManager[object]:
    """A DeathBeforeCommit where that point is armed, else nothing: it costs a thread that looks on."""
    return DeathBeforeCommit(points, name, table._path) if points.is_armed(name) else nullcontext()


def install_ledger_points(points: Points) -> None:
    """Around the commit of a micro-batch to the ledger, whose files are written."""
    commit = LedgerSink.commit

    def committing(sink: LedgerSink, *arguments: Any) -> None:
        points.hit("before_ledger_commit")
        commit(sink, *arguments)
        points.hit("after_ledger_commit")

    LedgerSink.commit = committing  # type: ignore[method-assign]


def install_view_points(points: Points) -> None:
    """Between the ledger's commit and the views', between those of two tables, and in a MERGE."""
    build, apply, merge = ViewBuilder._apply, ViewTable.apply, ViewTable._merge

    def building(builder: ViewBuilder, rows: Any, version: int) -> None:
        points.hit("before_views")
        build(builder, rows, version)
        points.hit("after_views")

    def applying(table: ViewTable, *arguments: Any) -> bool:
        has_committed = apply(table, *arguments)
        if has_committed:
            points.hit("between_views")
        return has_committed

    def merging(table: ViewTable, *arguments: Any) -> None:
        with dying_before_commit(points, "in_merge", table):
            merge(table, *arguments)

    ViewBuilder._apply = building  # type: ignore[method-assign]
    ViewTable.apply = applying  # type: ignore[method-assign]
    ViewTable._merge = merging  # type: ignore[method-assign]


def install_maintenance_points(points: Points) -> None:
    """In the compaction of a view table, after the work on it, and after that of the ledger."""
    tidy = ViewTable.tidy

    def dying_in(method: Callable[[ViewTable, Any], None]) -> Callable[[ViewTable, Any], None]:
        def compacting(table: ViewTable, shelves: Any) -> None:
            with dying_before_commit(points, "in_compaction", table):
                method(table, shelves)

        return compacting

    def tidying(table: ViewTable, keep_h: float) -> None:
        tidy(table, keep_h)
        points.hit("maintenance_views")

    class Ledger(maintain_tables.DeltaTable):
        """The table, which is left behind after its compaction."""

        def vacuum(self, *arguments: Any, **named: Any) -> Any:
            points.hit("maintenance_ledger")
            return super().vacuum(*arguments, **named)

    ViewTable.compact_shelf = dying_in(ViewTable.compact_shelf)  # type: ignore[method-assign]
    ViewTable._put_together = dying_in(ViewTable._put_together)  # type: ignore[method-assign]
    ViewTable.tidy = tidying  # type: ignore[method-assign]
    maintain_tables.DeltaTable = Ledger  # type: ignore[misc]


class FullDisk(threading.Thread):
    """Fills the file system of the stores until nothing more fits while this is armed, and makes room again.

    It begins when tasks have used a store: a new one on a full disk would end the worker by SIGBUS, because
    LMDB maps its lock file before anything is written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._filler = folder, folder / "filler"
        self._points = Points(crashing_tasks.TASKS)

    def run(self) -> None:
        """Look on until the process ends."""
        while not threading.Event().wait(_FILL_S):
            if not self._points.is_armed(DISK_FULL):
                if self._filler.exists():
                    os.truncate(self._filler, 0)  # a name that is gone says nothing about the room yet
                    self._filler.unlink()
                continue
            if not self._filler.exists() and not known_stores(self._folder):
                continue
            with suppress(OSError), self._filler.open("ab", buffering=0) as file:
                while file.write(_FILL_BYTES):
                    pass


def install_task_faults() -> None:
    """In Spark's Python workers; and on the disk of the stores, where they have one of their own."""
    settle_events.settle_partitions = crashing_tasks.settle_partitions  # type: ignore[attr-defined]
    stores = load_settings().state_path / "settling"
    if stores.is_mount():
        FullDisk(stores).start()


if __name__ == "__main__":
    its = Points("streams", with_parent=True)
    install_task_faults()
    install_ledger_points(its)
    install_view_points(its)
    install_maintenance_points(its)
    sys.exit(run_streams.main())
