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
        tokens, per_second, now = self._tokens(key, per_minute)
        wait_s = max(0.0, (count - tokens) / per_second)
        self._store(key, tokens if wait_s else tokens - count, now)
        return wait_s

    def take_part(self, key: _K, count: float, per_minute: float | None = None) -> float:
        """Take tokens from the key's bucket, or all that it has if they are fewer. Does not block.

        The arguments are those of `take`. Returns the number of tokens that the bucket did not have.
        """
        tokens, _, now = self._tokens(key, per_minute)
        self._store(key, max(0.0, tokens - count), now)
        return max(0.0, count - tokens)

    def _tokens(self, key: _K, per_minute: float | None) -> tuple[float, float, float]:
        """Return the tokens of the key's bucket, how many are added to it in a second, and the time now."""
        burst, per_second = (
            (self._burst, self._per_second) if per_minute is None else (per_minute, per_minute / 60)
        )
        now = self._clock()
        tokens, at = self._buckets.get(key, (burst, now))
        return min(burst, tokens + (now - at) * per_second), per_second, now

    def _store(self, key: _K, tokens: float, now: float) -> None:
        self._buckets.pop(key, None)
        self._buckets[key] = tokens, now
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
