"""The lag of the Delta view tables behind the log, read from their own commits."""

from __future__ import annotations

from typing import Any

from connectors.live.live_view import LiveView
from connectors.live.table_lag import TableLag
from connectors.live.table_progress_reader import ViewProgressReader
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings


class TableFreshness:
    """Asked once a second or so, by one thread at a time."""

    def __init__(self, settings: Settings, live_view: LiveView) -> None:
        self._live_view = live_view
        self._lag = TableLag(live_view)
        self._views = ViewProgressReader(settings)

    def measure(self) -> dict[str, Any]:
        """Return `records` that are settled and not in the tables, and how old the oldest of them is in
        milliseconds; None for both while there are no tables, or they cannot be read just now.
        """
        self._lag.look(self._live_view.next_offsets())
        try:
            progress = self._views.read()
        except TrunklineError:
            progress = None
        if progress is None:
            return {"records": None, "behind_ms": None}
        lag = self._lag.behind(progress.offsets)
        return {"records": sum(lag.records.values()), "behind_ms": round(lag.seconds * 1000)}
