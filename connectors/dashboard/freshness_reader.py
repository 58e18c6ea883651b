"""How far the Delta view tables are behind the log, read from their own commits (schemas/view_progress.py)."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from connectors.live_view import LiveView
from connectors.publisher import Position
from schemas.settings import Settings
from schemas.view_progress import read_progress
from schemas.views import STREAM_ENTRIES

# One look a second for ten minutes: tables that are further behind are older than that.
_LOOKS: Final = 600


class TableFreshness:
    """Asked once a second or so, by one thread at a time."""

    def __init__(self, settings: Settings, live_view: LiveView) -> None:
        self._path = settings.table_path(STREAM_ENTRIES)
        self._live_view = live_view
        self._table: DeltaTable | None = None
        self._looks: deque[tuple[float, dict[int, int]]] = deque(maxlen=_LOOKS)

    def measure(self) -> dict[str, Any]:
        """`records` that are settled and not in the tables, and how old the oldest of them is; None for what is
        not known, which is all of it while there are no tables.
        """
        now, settled = time.time(), self._live_view.next_offsets()
        self._looks.append((now, settled))
        offsets = self._offsets()
        if offsets is None:
            return {"records": None, "behind_ms": None}
        missing = {p: end - offsets.get(p, 0) for p, end in settled.items() if end > offsets.get(p, 0)}
        # When each was first seen to be missing; Kafka's own time where the record is in memory.
        since = [self._missing_since(partition, offsets.get(partition, 0)) for partition in missing]
        behind_s = max((now - moment for moment in since), default=0.0)
        return {"records": sum(missing.values()), "behind_ms": round(max(0.0, behind_s) * 1000)}

    def _missing_since(self, partition: int, offset: int) -> float:
        found = self._live_view.feed.find(Position(partition, offset))
        if found is not None:
            return found.logged_at_us / 1e6
        for moment, settled in self._looks:
            if settled.get(partition, 0) > offset:
                return moment
        return time.time()

    def _offsets(self) -> dict[int, int] | None:
        try:
            if self._table is None:
                if not DeltaTable.is_deltatable(self._path):
                    return None
                self._table = DeltaTable(self._path)
            else:
                self._table.update_incremental()
            return read_progress(self._table).offsets
        except (DeltaError, OSError, pa.ArrowException):
            # The tables are being swapped for rebuilt ones, or cleaned up: opened anew the next time.
            self._table = None
            return None
