"""The lag of a table behind the log: how many records it lacks, and the age of the oldest of these."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from connectors.hub.live.live_view import LiveView
from schemas.wire.partitions import Position

# The number of looks to remember. A table may be further behind than the oldest of them.
_LOOKS: Final = 600


class Lag(NamedTuple):
    """The number of `records` that a table lacks, by partition, and the age in `seconds` of the oldest."""

    records: dict[int, int]
    seconds: float


class TableLag:
    """A comparison of a table's progress with the end of the log. Not thread-safe.

    Call `look` regularly with the log's end. `behind` compares a table with the end given last. From the ends
    given before, it finds out how old the missing records are.
    """

    def __init__(self, live_view: LiveView) -> None:
        self._live_view = live_view
        self._looks: deque[tuple[float, dict[int, int]]] = deque(maxlen=_LOOKS)

    def look(self, ends: Mapping[int, int]) -> None:
        """Remember the current end of the log with the time of this call.

        Args:
            ends: The offset after the last record to compare with, by partition: that of the log's last record,
                or of the last one that the gateway has settled.
        """
        self._looks.append((time.time(), dict(ends)))

    def behind(self, offsets: Mapping[int, int]) -> Lag:
        """Return the lag of a table behind the end given to the last call of `look`; no lag before the first.

        Args:
            offsets: The first offset that the table lacks, by partition, such as `LedgerProgress.ends`. A
                missing partition counts as 0.
        """
        now, ends = self._looks[-1] if self._looks else (time.time(), {})
        missing = {partition: max(0, end - offsets.get(partition, 0)) for partition, end in ends.items()}
        since = [self._missing_since(p, offsets.get(p, 0), now) for p, count in missing.items() if count]
        return Lag(missing, max((now - moment for moment in since), default=0.0))

    def _missing_since(self, partition: int, offset: int, now: float) -> float:
        """Return when the record was logged, by Kafka's clock, or first seen if it is not in memory."""
        found = self._live_view.feed.find(Position(partition, offset))
        if found is not None:
            return min(now, found.logged_at_us / 1e6)
        return next((moment for moment, ends in self._looks if ends.get(partition, 0) > offset), now)
