"""Fairness among the principals that use a gateway at once: turns, records under way, and the pace of refusals.

The event loop runs all that is ready before it reads from connections again. Without turns, a principal with 30
connections has 30 requests handled in each of these steps, and a request of any other principal waits for all
of them at each of its own steps. With turns, each principal begins one request in a step.

All records share one log and one fold, so a record waits until those before it are settled. With a bound on the
records under way, it waits for few of each principal, whatever the number of a principal's connections.

A client that ignores `Retry-After` sends its next request as soon as it has the answer. If the answer is held
for about the time for which the client was to wait, such a client costs little, whatever its speed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException

from connectors.plumbing.network.rates import TokenBuckets


class FairTurns:
    """Lets each principal begin one request in each step of the event loop.

    Not thread-safe: for one event loop. The number of waiting requests is bounded by the number of connections.
    """

    def __init__(self) -> None:
        # The principals that have begun a request in this step, and the requests that wait, oldest first.
        self._begun: set[str] = set()
        self._waiting: dict[str, deque[Callable[[], object]]] = {}

    def begin(self, principal: str, start: Callable[[], object]) -> None:
        """Call `start` when a request of this principal may begin: now, or in one of the next steps.

        Requests of one principal keep their order. `start` returns False if its client has gone, so that the
        next one may begin in its place.
        """
        if principal in self._begun:
            self._waiting.setdefault(principal, deque()).append(start)
            return
        self._note(principal)
        start()

    async def wait(self, principal: str) -> None:
        """Wait until a request of this principal may begin, as `begin` does."""
        if principal not in self._begun:
            self._note(principal)
            return
        turn = asyncio.get_running_loop().create_future()
        self.begin(principal, lambda: False if turn.done() else turn.set_result(None))
        await turn

    def _note(self, principal: str) -> None:
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        self._begun.add(principal)

    def _next(self) -> None:
        """Let the next request of each principal begin. The event loop calls it in each step with requests."""
        self._begun.clear()
        for principal in list(self._waiting):
            waiting = self._waiting[principal]
            self._note(principal)
            while waiting and waiting.popleft()() is False:
                pass
            if not waiting:
                del self._waiting[principal]


# So few that others wait little, and more than one, so that requests of one principal overlap.
MOST: Final = 4


class UnderWay:
    """Lets each principal have at most `most` records under way. Not thread-safe: for one event loop.

    Attributes:
        mailboxes: Realm and recipient of each message under way, by the message's id.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._count: Counter[str] = Counter()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._ended: deque[str] = deque()
        self._is_ending = False
        self.mailboxes: dict[str, tuple[str, str]] = {}

    def begin(self, principal: str, start: Callable[[], None]) -> None:
        """Call `start` when the principal may have one more record under way: now or later. Then call `end`.

        Requests of one principal keep their order. The number of those that wait is bounded by its connections.
        """
        if self._count[principal] < self._most:
            self._count[principal] += 1
            start()
        else:
            self._waiting.setdefault(principal, deque()).append(start)

    def end(self, principal: str) -> None:
        """Note that a record is no longer under way. Its place goes to the oldest one that waits.

        A record that begins so may fail at once, and end within this call. That takes no more of the stack,
        because thousands may fail one after the other.
        """
        self._ended.append(principal)
        if self._is_ending:
            return
        self._is_ending = True
        try:
            while self._ended:
                self._give_on(self._ended.popleft())
        finally:
            self._is_ending = False

    def _give_on(self, principal: str) -> None:
        waiting = self._waiting.get(principal)
        if waiting:
            start = waiting.popleft()
            if not waiting:
                del self._waiting[principal]
            start()
            return
        self._count[principal] -= 1
        if not self._count[principal]:
            del self._count[principal]

    @asynccontextmanager
    async def one(self, principal: str) -> AsyncIterator[None]:
        """Wait until the principal may have one more record under way, which ends with the context."""
        place = asyncio.get_running_loop().create_future()

        def start() -> None:
            if place.done():  # its client has gone
                self.end(principal)
            else:
                place.set_result(None)

        self.begin(principal, start)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.end(principal)
            raise
        try:
            yield
        finally:
            self.end(principal)


# A principal gets so many refusals at once, and then so many in a second.
BURST: Final = 20
PER_SECOND: Final = 20.0
HELD_MOST_S: Final = 5.0
_MOST: Final = 10_000


class RefusalPace:
    """Holds the answers of a principal's requests that exceed a limit. Not thread-safe: for one event loop.

    Each principal gets `BURST` of them at once, and then `PER_SECOND` in a second. None is held longer than
    `HELD_MOST_S`. The number of held answers is bounded by the connections of the principal. Other answers are
    not held.

    Args:
        clock: Returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets: TokenBuckets[str] = TokenBuckets(BURST, PER_SECOND, clock, _MOST)

    def held_s(self, principal: str) -> float:
        """Return for how many seconds the next refusal of a principal is to be held. It counts as one."""
        return self._buckets.owe(principal, HELD_MOST_S)

    async def hold(self, principal: str, error: Exception) -> None:
        """Wait before the answer to a refused request, if `error` is an HTTPException with the status 429."""
        if isinstance(error, HTTPException) and error.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            held_s = self.held_s(principal)
            if held_s:
                await asyncio.sleep(held_s)
