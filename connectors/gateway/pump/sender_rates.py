"""How many messages a minute one sender may post: a bucket for each, that fills evenly."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_MINUTE_S: Final = 60.0
_SENDERS: Final = 10_000


class SenderRates:
    """`per_minute` messages a minute for each sender, as many at once; None: any number. Of one gateway."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when

    def take(self, sender: str) -> float | None:
        """Count one message; the seconds to wait when it is one too many, else None."""
        if self._per_minute is None:
            return None
        now, a_second = self._clock(), self._per_minute / _MINUTE_S
        tokens, at = self._buckets.pop(sender, (float(self._per_minute), now))
        tokens = min(float(self._per_minute), tokens + (now - at) * a_second)
        is_one_too_many = tokens < 1
        self._buckets[sender] = (tokens if is_one_too_many else tokens - 1, now)
        if len(self._buckets) > _SENDERS:
            self._buckets.popitem(last=False)
        return (1 - tokens) / a_second if is_one_too_many else None
