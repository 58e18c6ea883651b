"""Token buckets, which limit the rate of events for each key, such as requests of a principal."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)


class TokenBuckets(Generic[_K]):
    """A rate limit for each key: each key has a bucket of tokens, and each event takes one. Not thread-safe.

    Args:
        burst: The tokens of a full bucket. A new bucket is full.
        per_second: The tokens that are added to a bucket in a second.
        clock: Returns seconds and never goes back.
        most: The number of buckets in memory. Beyond it, the one used longest ago is removed; its key then has
            a full bucket again.
    """

    def __init__(
        self,
        burst: float,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        most: int = 10_000,
    ) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._most = most
        self._buckets: OrderedDict[_K, tuple[float, float]] = OrderedDict()  # tokens, and their time

    def take(self, key: _K, count: float = 1, per_minute: float | None = None) -> float:
        """Take tokens from the key's bucket, if the bucket has so many. Does not block.

        Args:
            key: The key of the bucket.
            count: The number of tokens.
            per_minute: The size of this bucket, which is then filled in a minute. None: that of all buckets.

        Returns:
            0 if the tokens were taken. Otherwise the event exceeds the rate, and the result is the number of
            seconds until the bucket has so many tokens.
        """
        burst, per_second = (
            (self._burst, self._per_second) if per_minute is None else (per_minute, per_minute / 60)
        )
        now = self._clock()
        tokens, at = self._buckets.pop(key, (burst, now))
        tokens = min(burst, tokens + (now - at) * per_second)
        wait_s = max(0.0, (count - tokens) / per_second)
        self._buckets[key] = (tokens if wait_s else tokens - count, now)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return wait_s
