"""Streams of the gateway: answers without an end, for clients that may be slow or disconnect.

This is the only server-side event-stream mechanism; the hub and the dashboard share it. It provides:

- `server_event` and `PING`: the frames of server-sent events (WHATWG HTML, section 9.2). An id is a log
  position.
- `StreamPlaces`: a limit of streams, in all and for each principal.
- `StreamingAnswer`: sends chunks as they come. It queues nothing: while the client does not read, the source is
  not asked. A client that reads nothing for `send_timeout_s` is cut off.

`sse-starlette` does not meet these rules. After a send timeout it leaves the connection open, so the bytes that
the kernel has not taken stay in memory until the client disconnects. It also pings while data flows, has no
limit of streams, and watches the shutdown of one uvicorn server, while the gateway runs several in one process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Final

from fastapi import Header, Response
from starlette.types import Message, Receive, Scope, Send

from connectors.gateway.web.answers import BUSY, unavailable
from connectors.gateway.web.bounded_http import ABORT

EVENT_STREAM: Final = "text/event-stream"
PING: Final = b": ping\n\n"
SEND_TIMEOUT_S: Final = 60.0
STREAMS_LIMIT: Final = 512
# The share of one principal, so that no principal shuts out the others.
STREAMS_SHARE: Final = 256
LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        max_length=64,
        description="Id of the last event that the client got. The stream goes on after it.",
    ),
]
"""The header by which a client resumes a stream of server-sent events."""


def server_event(name: str, event_id: str, data: bytes) -> bytes:
    """Return the bytes of one server-sent event.

    `name` is the event's type, and `event_id` the log position that a client sends back when it reconnects.
    `data` must be one line, such as the output of orjson.
    """
    return b"event: %b\nid: %b\ndata: %b\n\n" % (name.encode(), event_id.encode(), data)


def _nothing() -> None:
    return None


class StreamPlaces:
    """A limit of simultaneous streams: `limit` in all and `share` for each principal. Not thread-safe."""

    def __init__(self, limit: int = STREAMS_LIMIT, share: int = STREAMS_SHARE) -> None:
        self._limit = limit
        self._share = share
        self._held: Counter[str] = Counter()

    def take(self, principal: str) -> bool:
        """Take a place for one more stream of this principal, and return whether there was one. Does not block.

        After True, the caller must call `give_back` when the stream has ended. After False, it must not.
        """
        if self._held.total() >= self._limit or self._held[principal] >= self._share:
            return False
        self._held[principal] += 1
        return True

    def give_back(self, principal: str) -> None:
        """Free the place of one stream of this principal. Call it once for each successful `take`."""
        self._held[principal] -= 1
        self._held += Counter()  # removes principals without a place

    def answer(
        self,
        principal: str,
        chunks: Callable[[], AsyncIterator[bytes]],
        media_type: str,
        ended: Callable[[], None] = _nothing,
    ) -> StreamingAnswer:
        """Return a streaming response that has one of the principal's places until the response ends.

        `chunks` is called when the response begins, and yields the bytes of the stream. `ended` is called when
        the response has ended. Raises ApiError (503) if the principal has no free place.
        """
        if not self.take(principal):
            raise unavailable("too many streams at once; try again later", BUSY)

        def end() -> None:
            self.give_back(principal)
            ended()

        return StreamingAnswer(chunks, media_type, end)


class StreamingAnswer(Response):
    """An HTTP response that sends each chunk as soon as the source yields it.

    The response ends when the source ends. If the client disconnects before, or does not read for
    `send_timeout_s`, the connection is aborted.

    Args:
        chunks: Returns the source of the bytes. The source is closed when the response ends.
        media_type: The media type of the response.
        ended: Called once, when nothing more is sent.
        send_timeout_s: How many seconds one send may wait for the client.
        stalled: Called before `ended` if the client was cut off because it did not read.
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
        """Send the chunks until the source ends, or the client disconnects or stops reading."""
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
                # The answer has begun, so it can only be broken off.
                raise error
        finally:
            if not self._is_whole and ABORT in scope:
                # Otherwise the unsent bytes would stay in memory until the client disconnects.
                scope[ABORT]()
            self._ended()

    async def _send_all(self, send: Send) -> None:
        async def put(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            await put({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._chunks()) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    await put({"type": "http.response.body", "body": chunk, "more_body": True})
            await put({"type": "http.response.body", "body": b"", "more_body": False})
            self._is_whole = True
        except TimeoutError:
            self._stalled()
        except OSError:
            return


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
