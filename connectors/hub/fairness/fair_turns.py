"""Turns in which the requests of principals begin, so that one with many requests does not hold up the others.

The event loop runs all that is ready before it reads from connections again. Without turns, a principal with 30
connections has 30 requests handled in each of these steps, and a request of any other principal waits for all
of them at each of its own steps. With turns, each principal begins one request in a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


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
