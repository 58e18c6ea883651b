"""How many records the tables lack, and how long the oldest of them has been missing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from connectors.live.live_view import LiveView
from connectors.log.publisher import Position

# Looks that are remembered. A table that is further behind than the oldest of them is older than that.
_LOOKS: Final = 600


class Lag(NamedTuple):
    """`records` by partition, 0 where nothing is missing; `seconds` since the oldest of them was logged."""

    records: dict[int, int]
    seconds: float


class TableLag:
    """Compares a table's progress with the log as one gateway knows it. For one thread at a time."""

    def __init__(self, live_view: LiveView) -> None:
        self._live_view = live_view
        self._looks: deque[tuple[float, dict[int, int]]] = deque(maxlen=_LOOKS)

    def look(self, ends: Mapping[int, int]) -> None:
        """Remember where the log, or the part of it that counts, ends now; by partition the next offset."""
        self._looks.append((time.time(), dict(ends)))

    def behind(self, offsets: Mapping[int, int]) -> Lag:
        """Return what lies between `offsets`, the first ones that a table lacks, and the newest look."""
        now, ends = self._looks[-1] if self._looks else (time.time(), {})
        missing = {partition: max(0, end - offsets.get(partition, 0)) for partition, end in ends.items()}
        since = [self._missing_since(p, offsets.get(p, 0), now) for p, count in missing.items() if count]
        return Lag(missing, max((now - moment for moment in since), default=0.0))

    def _missing_since(self, partition: int, offset: int, now: float) -> float:
        """When the record was logged, by Kafka's clock, or first seen in the log if it is not in memory."""
        found = self._live_view.feed.find(Position(partition, offset))
        if found is not None:
            return min(now, found.logged_at_us / 1e6)
        return next((moment for moment, ends in self._looks if ends.get(partition, 0) > offset), now)
