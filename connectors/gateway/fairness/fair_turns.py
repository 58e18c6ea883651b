"""Turns in which the requests of principals begin, so that one with many requests does not hold up the others.

The event loop runs all that is ready before it reads from connections again. Without turns, a principal with 30
connections has 30 requests handled in each of these steps, and a request of any other principal waits for all
of them at each of its own steps. With turns, one request begins in each step.
"""

from __future__ import annotations

import asyncio

from connectors.rates.round_robin import RoundRobin


class FairTurns:
    """Lets one request begin in each step of the event loop, of one principal after the other.

    Not thread-safe: for one event loop. A request that finds no other one waits for nothing. The number of
    waiting requests is bounded by the number of connections.
    """

    def __init__(self) -> None:
        self._waiting: RoundRobin[str, asyncio.Future[None]] = RoundRobin()
        self._has_begun = False

    async def wait(self, principal: str) -> None:
        """Wait until a request of this principal may begin. Requests of one principal keep their order."""
        loop = asyncio.get_running_loop()
        if not self._has_begun:
            self._has_begun = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.push(principal, turn)
        await turn

    def _next(self) -> None:
        """Let the next request begin. The event loop calls it once in each step, until no request waits."""
        while self._waiting:
            _, turn = self._waiting.pop()
            if not turn.done():  # it is done if its client has gone
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._has_begun = False
