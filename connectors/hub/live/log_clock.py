"""The difference between the log's clock and that of this process, learned from records.

The log's time is that of the broker that leads a partition (LogAppendTime), and the fold knows no other. A
process whose clock differs would ask for a change too early, and be refused, or too late.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from connectors.hub.live.settled_feed import SettledRecord
from schemas.wire.record import partition_for

# Asks that nobody answered are forgotten beyond this number.
_ASKS_MOST: Final = 10_000
# A smaller difference is left alone: it is within the delays of a network.
_LEAST_US: Final = 200_000
_STALE_S: Final = 10.0

Answered = Callable[[SettledRecord], None]


class LogClock:
    """The offset of the log's clock for each partition. Thread-safe.

    A record that this process has appended was logged between its append and the moment at which it was settled
    here, so that its log time bounds the offset from both sides. Any other record bounds it from below.

    Args:
        partitions: The partition count of the topic.
        clock_us: Returns this process's time in microseconds since 1970 UTC.
    """

    def __init__(
        self, partitions: int = 1, clock_us: Callable[[], int] = lambda: time.time_ns() // 1000
    ) -> None:
        self._partitions = partitions
        self.clock_us = clock_us
        self._lock = threading.Lock()
        self._offsets: dict[int, int] = {}
        self._asks: OrderedDict[str, tuple[int, Answered | None]] = OrderedDict()
        self._learned_at = 0.0

    def offset_us(self, stream: str | None = None) -> int:
        """Return the log's time minus this process's, in microseconds.

        Args:
            stream: The stream, such as `mailbox/default/bo`, of whose partition it is; 0 if that is not known.
                None: of the known partition where it is nearest to 0; 0 if none is known.
        """
        if not self._offsets:
            return 0
        if stream is not None:
            return self._offsets.get(partition_for(stream.encode(), self._partitions), 0)
        with self._lock:
            return min(self._offsets.values(), key=abs, default=0)

    def now_us(self, stream: str | None = None) -> int:
        """Return the log's present time in microseconds since 1970 UTC, for the partition of a stream."""
        return self.clock_us() + self.offset_us(stream)

    def now_s(self) -> float:
        """Return the log's present time in seconds since 1970 UTC."""
        return self.now_us() / 1e6

    def ask(self, ce_id: str, answered: Answered | None = None) -> None:
        """Note that this process appends a record now. `answered` is called when it is settled."""
        with self._lock:
            self._asks[ce_id] = (self.clock_us(), answered)
            if len(self._asks) > _ASKS_MOST:
                self._asks.popitem(last=False)

    def sample(self, ce_id: str) -> None:
        """Do as `ask` does, unless the clock was compared in the last ten seconds."""
        if time.monotonic() - self._learned_at > _STALE_S:
            self.ask(ce_id)

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Learn from newly settled records. Register it with `LiveView.on_settled`."""
        if not records:
            return
        now_us = self.clock_us()
        # Old records, which a starting process settles, bound the offset far from below, and change nothing.
        newest = records[-1]
        self._raise(newest.position.partition, newest.logged_at_us - now_us)
        if not self._asks:
            return
        answers = []
        with self._lock:
            for record in records:
                asked = None if record.ce_id is None else self._asks.pop(record.ce_id, None)
                if asked is not None:
                    self._bound(record.position.partition, record.logged_at_us, asked[0], now_us)
                    answers.append((record, asked[1]))
        for record, answered in answers:
            if answered is not None:
                answered(record)

    def _raise(self, partition: int, least_us: int) -> None:
        if least_us > self._offsets.get(partition, 0) + _LEAST_US:
            with self._lock:
                self._offsets[partition] = least_us

    def _bound(self, partition: int, logged_us: int, asked_us: int, settled_us: int) -> None:
        """Take the offset that is nearest to zero and between the bounds."""
        least, most = logged_us - settled_us, logged_us - asked_us
        self._learned_at = time.monotonic()
        if least - _LEAST_US <= 0 <= most + _LEAST_US:
            self._offsets.pop(partition, None)
            return
        known = self._offsets.get(partition, 0)
        # The nearest offset would move with each answer by the time that it took.
        if not least - _LEAST_US <= known <= most + _LEAST_US:
            self._offsets[partition] = least if least > 0 else most
