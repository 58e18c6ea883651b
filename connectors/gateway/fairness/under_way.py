"""A bound on the records of one principal that are under way to the log at once.

All records share one log and one fold, so a record waits until those before it are settled. With this bound, it
waits for few of each principal, whatever the number of a principal's connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
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
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()
        self.mailboxes: dict[str, tuple[str, str]] = {}

    @asynccontextmanager
    async def one(self, principal: str) -> AsyncIterator[None]:
        """Wait until the principal may have one more record under way, which ends with the context.

        Requests of one principal keep their order. The number of those that wait is bounded by its connections.
        """
        semaphore = self._semaphores.setdefault(principal, asyncio.Semaphore(self._most))
        self._users[principal] += 1
        try:
            async with semaphore:
                yield
        finally:
            self._users[principal] -= 1
            if not self._users[principal]:
                del self._users[principal], self._semaphores[principal]
