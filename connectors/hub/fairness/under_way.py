"""A bound on the records of one principal that are under way to the log at once.

All records share one log and one fold, so a record waits until those before it are settled. With this bound, it
waits for few of each principal, whatever the number of a principal's connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

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
