"""Rates and turns: pauses between attempts, token buckets, few records of refusals, and a fair queue."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from math import inf
from typing import Final, Generic, TypeVar

import structlog

from schemas.streams.refused.refusal import ANONYMOUS, Refusal, RefusalReason
from schemas.wire.record import OutgoingRecord

T = TypeVar("T")

_LOG_AGAIN_S: Final = 60.0


class Backoff:
    """Growing pauses between attempts: `first_s` seconds, then twice as long each time, up to `most_s`.

    The object does not wait itself. Not thread-safe: one thread makes the attempts.
    """

    def __init__(self, first_s: float = 0.1, most_s: float = 1.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._pause_s = first_s
        self._logged, self._logged_at = "", -inf

    def reset(self) -> None:
        """Begin with the shortest pause again. Call it after an attempt that succeeded."""
        self._pause_s = self._first_s

    def next_s(self) -> float:
        """Return for how many seconds to wait before the next attempt.

        Each call returns twice as much as the one before, up to `most_s`.
        """
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._most_s)
        return pause_s

    def is_to_log(self, reason: str) -> bool:
        """Return whether to log `reason`, a text that says why an attempt has failed.

        The result is True for a text that differs from the last logged one, and once a minute for the same
        text. True counts as logged.
        """
        if reason == self._logged and time.monotonic() - self._logged_at <= _LOG_AGAIN_S:
            return False
        self._logged, self._logged_at = reason, time.monotonic()
        return True


def retry(action: Callable[[], T], on: tuple[type[Exception], ...], times: int, pause_s: float) -> T:
    """Call `action` until it succeeds, and return its result. Block during the calls and the pauses.

    Args:
        action: The call to repeat.
        on: The exceptions after which it is called again. Others are raised at once.
        times: Call it at most this many times. The exception of the last call is raised.
        pause_s: The pause between two calls, in seconds.
    """
    for _ in range(times - 1):
        try:
            return action()
        except on:
            time.sleep(pause_s)
    return action()


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

    def owe(self, key: _K, most_s: float) -> float:
        """Take a token, also one that is not there yet. Return how long until it is there, at most `most_s`."""
        tokens, per_second, now = self._tokens(key, None)
        tokens = max(tokens - 1, -most_s * per_second)
        self._store(key, tokens, now)
        return max(0.0, -tokens / per_second)

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


log = structlog.stdlib.get_logger(__name__)

BURST: Final = 5.0
PER_SECOND: Final = 0.1
_BUCKETS: Final = 10_000


class FewRefusals:
    """A rate-limited recorder of refused requests. Not thread-safe.

    `append` appends a record to the log, and must not block. `clock` returns seconds and never goes back.
    `door` is the door of the requests.
    """

    def __init__(
        self,
        append: Callable[[OutgoingRecord], object],
        clock: Callable[[], float] = time.monotonic,
        *,
        door: str,
    ) -> None:
        self._append = append
        self._door = door
        self._buckets: TokenBuckets[tuple[str, str, str]] = TokenBuckets(BURST, PER_SECOND, clock, _BUCKETS)
        self._suppressed: OrderedDict[tuple[str, str, str], int] = OrderedDict()

    def record(self, reason: RefusalReason, why: str, principal: str | None, route: str) -> None:
        """Append a record of a refused request to the log, or only count it if there were too many.

        For each principal, route and reason, five records may follow at once, and then one every ten seconds.
        The next record that is appended carries the number of those that were only counted. The method does not
        block.

        Args:
            reason: The code of the refusal, such as `policy`.
            why: The explanation, which must quote no secret.
            principal: The sender of the request; None if it is unknown.
            route: Method and path template of the route, not the path that was sent.
        """
        name = principal or ANONYMOUS
        key = (name, route, reason)
        suppressed = self._suppressed.pop(key, 0)
        if self._buckets.take(key):
            self._suppressed[key] = suppressed + 1
            if len(self._suppressed) > _BUCKETS:
                self._suppressed.popitem(last=False)
            return
        refusal = Refusal(
            request_id=str(uuid.uuid4()),
            reason=reason,
            why=why,
            principal=name,
            route=route[:200],
            suppressed=suppressed,
        )
        log.info("refused", reason=reason, why=why, principal=name, route=route, suppressed=suppressed)
        self._append(refusal.record(door=self._door, principal=refusal.principal))


_T = TypeVar("_T")


class RoundRobin(Generic[_K, _T]):
    """A queue that gives the next item of one key after the other. Not thread-safe.

    The items of a key keep their order. The queue is not bounded.
    """

    def __init__(self) -> None:
        # The keys in the order of their turns, each with its items, oldest first.
        self._waiting: OrderedDict[_K, deque[_T]] = OrderedDict()
        self._held: dict[_K, deque[_T]] = {}

    def push(self, key: _K, item: _T) -> None:
        """Add an item. A key without items gets the last turn."""
        held = self._held.get(key)
        (self._waiting.setdefault(key, deque()) if held is None else held).append(item)

    def pop(self) -> tuple[_K, _T]:
        """Remove the oldest item of the key whose turn it is, and return both.

        Raises KeyError if no key without a hold has an item.
        """
        key, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[key] = items
        return key, item

    def hold(self, key: _K) -> None:
        """Give the key no more turns until `release`. It keeps its items."""
        self._held[key] = self._waiting.pop(key, deque())

    def release(self, key: _K) -> None:
        """Give the key turns again; the last turn comes first. Does nothing for a key without a hold."""
        items = self._held.pop(key, None)
        if items:
            self._waiting[key] = items

    def __bool__(self) -> bool:
        """Return whether a key without a hold has an item."""
        return bool(self._waiting)
