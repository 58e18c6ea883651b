"""A long answer: chunks that are sent as they come, to a client that may be slow, or gone.

Nothing is queued here: while the client does not read, the source is not asked. A client that takes nothing
for a minute is cut off, with all that was to be sent to it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from connectors.gateway.web.bounded_http import ABORT

SEND_TIMEOUT_S: Final = 60.0
STREAMS_LIMIT: Final = 512
# What one principal may hold: nobody can shut out the others.
STREAMS_SHARE: Final = 256


def _nothing() -> None:
    return None


class StreamPlaces:
    """How many long answers there are at once, in all and for each principal."""

    def __init__(self, limit: int = STREAMS_LIMIT, share: int = STREAMS_SHARE) -> None:
        self._limit = limit
        self._share = share
        self._held: Counter[str] = Counter()

    def take(self, principal: str) -> bool:
        """Take a place, if one is free for this principal."""
        if self._held.total() >= self._limit or self._held[principal] >= self._share:
            return False
        self._held[principal] += 1
        return True

    def give_back(self, principal: str) -> None:
        """Free a place."""
        self._held[principal] -= 1
        self._held += Counter()  # forgets who holds none


class StreamingAnswer(Response):
    """Sends what `chunks` yields, each at once. `ended` is called once, when nothing more is sent; `stalled`
    before that, if the client did not read.
    """

    def __init__(
        self,
        chunks: Callable[[], AsyncIterator[bytes]],
        media_type: str,
        ended: Callable[[], None],
        send_timeout_s: float = SEND_TIMEOUT_S,
        stalled: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(b"", 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type)
        del self.headers["content-length"]
        self._chunks = chunks
        self._ended = ended
        self._send_timeout_s = send_timeout_s
        self._stalled = stalled
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends, the client goes, or it stops reading."""
        try:
            sending = asyncio.create_task(self._send_all(send))
            leaving = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)
            if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                # The answer has begun; all that is left is to break it off.
                raise error
        finally:
            if not self._is_whole and ABORT in scope:
                # What the kernel has not taken would else be kept until the client goes.
                scope[ABORT]()
            self._ended()

    async def _send_all(self, send: Send) -> None:
        async def put(message: Message) -> None:
            await _in_time(send(message), self._send_timeout_s)

        try:
            await put({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._chunks()) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    await put({"type": "http.response.body", "body": chunk, "more_body": True})
            await put({"type": "http.response.body", "body": b"", "more_body": False})
            self._is_whole = True
        except TimeoutError:
            self._stalled()
        except OSError:
            return


async def _in_time(sent: Awaitable[None], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        await sent


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
