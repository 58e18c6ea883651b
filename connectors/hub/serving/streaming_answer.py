"""Answers of the gateway that are no documents: files, parts of contents, and streams without an end.

Conditions and ranges are those of RFC 9110, sections 13 and 14, for a content that never changes.

This is the only server-side event-stream mechanism; the hub and the dashboard share it. It provides:

- `server_event` and `PING`: the frames of server-sent events (WHATWG HTML, section 9.2). An id is a log
  position.
- `StreamPlaces`: the places of streams, which principals share, and their memory.
- `StreamingAnswer`: sends chunks as they come. It queues nothing: while the client does not read, the source is
  not asked. A client that reads nothing for `gateway.stream_unread_s` is cut off, and after 5 s if others wait
  for memory. It comes back with the id of the last event that it got whole.

`sse-starlette` does not meet these rules. After a send timeout it leaves the connection open, so the bytes that
the kernel has not taken stay in memory until the client disconnects. It also pings while data flows, has no
limit of streams, and watches the shutdown of one uvicorn server, while the gateway runs several in one process.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

import structlog
from fastapi import Header, Request, Response
from starlette.types import Message, Receive, Scope, Send

from connectors.hub.serving.answers import ApiError, crowded
from connectors.hub.serving.bounded_http import ABORT, IS_STREAM, SEND_BUFFER
from connectors.hub.serving.policy import Caller
from connectors.hub.serving.shares import ByteBudget, Places, Rooms
from schemas.streams.principal.principals import OPERATOR

MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class PageFile(NamedTuple):
    """One file of a web page: its bytes, its media type, and its ETag (a hash of the bytes)."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, content: bytes, suffix: str) -> PageFile:
        """Return the file with this content. `suffix` is the end of its name, a key of `MEDIA_TYPES`."""
        return cls(content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')

    def answer(self, request: Request, more_headers: Mapping[str, str] = _NONE) -> Response:
        """Return the HTTP response with the file, or status 304 if the browser's copy has the same ETag."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache", **more_headers}
        if is_unchanged(request.headers, self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


# One range. Several in one request are ignored, which section 14.2 allows: the answer is the whole content.
_ONE_RANGE: Final = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)


class ByteRange(NamedTuple):
    """A part of a content: from byte `start` up to, but without, byte `end`."""

    start: int
    end: int


def is_unchanged(headers: Mapping[str, str], etag: str) -> bool:
    """Return whether the client has the content with this strong ETag already, by its If-None-Match."""
    known = [one.strip().removeprefix("W/") for one in headers.get("if-none-match", "").split(",")]
    return etag in known or known == ["*"]


def range_of(headers: Mapping[str, str], etag: str, size: int) -> ByteRange | None:
    """Return the part of a content that a request asks for, or None for all of it.

    Args:
        headers: The headers of the request, by their names in lower case.
        etag: The strong ETag of the content. With another one in If-Range the answer is the whole content.
        size: The length of the content in bytes.

    Raises:
        ApiError: 416, if the content has no byte of the range.
    """
    found = _ONE_RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", etag) != etag:
        return None
    first, last = found.groups()
    if first:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    elif last:
        start, end = max(0, size - int(last)), size
    else:
        return None
    if start >= end:
        raise ApiError(
            416,
            "range_not_satisfiable",
            f"the content has {size} bytes, and none in the range {found[0]}",
            {"Content-Range": f"bytes */{size}"},
        )
    return ByteRange(start, end)


log = structlog.stdlib.get_logger(__name__)

EVENT_STREAM: Final = "text/event-stream"
PING: Final = b": ping\n\n"
# The most bytes of events that a source puts together, and the bytes that are handed to the connection at once.
CHUNK_BYTES: Final = 64 * 1024
SEND_BUFFER_BYTES: Final = 256 * 1024
# The time after which a client that does not read is cut off while others wait for the memory of streams.
_CROWDED_S: Final = 5.0
_CHECK_S: Final = 1.0
_ROOM_WAIT_S: Final = 10.0
_NO_ROOM: Final = b": the gateway has too many long events under way; come back with Last-Event-ID\n\n"

Reserve = Callable[[int], Awaitable[None]]
"""Waits until there is memory for so many bytes. A source calls it before it builds a long chunk."""

Source = Callable[[Reserve], AsyncIterator[bytes]]
"""Returns the chunks of a stream."""

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
    """The places of streams, which principals share, and the memory of what is sent on them. Not thread-safe.

    Args:
        budget: The memory of all answers and streams of the gateway.
        limit: The number of places.
        most: The most places of one principal, in addition to its share. None: no such limit.
        unread_s: The time after which a client that reads nothing is cut off.
        on_unread: Called for each client that is cut off because it did not read.
    """

    def __init__(
        self,
        budget: ByteBudget,
        limit: int,
        most: int | None = None,
        *,
        unread_s: float = 60.0,
        on_unread: Callable[[], None] = _nothing,
    ) -> None:
        self._budget = budget
        self._places = Places(limit, most)
        self._unread_s = unread_s
        self._on_unread = on_unread

    def answer(
        self,
        caller: Caller,
        chunks: Source,
        media_type: str,
        *,
        ended: Callable[[], None] = _nothing,
    ) -> StreamingAnswer:
        """Return a streaming response that has one of the caller's places until the response ends.

        `chunks` is called when the response begins, and `ended` when it has ended. Raises ApiError (503) if the
        caller's principal has no free place.
        """
        principal = caller.principal
        if not self._places.take(principal, is_operator=caller.role == OPERATOR):
            raise crowded("too many streams at once; try again later")

        def end() -> None:
            self._places.give_back(principal)
            ended()

        return StreamingAnswer(
            chunks,
            media_type,
            StreamRoom(self._budget, principal),
            ended=end,
            unread_s=self._unread_s,
            on_unread=self._on_unread,
        )


class NoRoomError(Exception):
    """The gateway has no memory for the next event of a stream."""


class StreamRoom(Rooms):
    """The memory of what one stream sends at present, out of the budget of all answers and streams.

    Args:
        budget: The budget.
        principal: The principal that the memory counts for.
    """

    def __init__(self, budget: ByteBudget, principal: str) -> None:
        super().__init__(budget)
        self._principal = principal

    @property
    def is_wanted(self) -> bool:
        """True if answers or streams wait for memory."""
        return self._budget.waiting > 0

    async def reserve(self, size: int) -> None:
        """Wait until there is memory for `size` bytes. Up to 64 KiB are not counted.

        Raises NoRoomError if others need the memory for longer than 10 s.
        """
        self.release()
        if size <= CHUNK_BYTES:
            return
        room = await self._budget.take(self._principal, size, _ROOM_WAIT_S)
        if room is None:
            raise NoRoomError
        self.add(room)


class StreamingAnswer(Response):
    """An HTTP response that sends each chunk as soon as the source yields it.

    The response ends when the source ends. If the client disconnects before, or does not read for `unread_s`,
    the connection is aborted.

    Args:
        chunks: Returns the source of the bytes. The source is closed when the response ends.
        media_type: The media type of the response.
        room: The memory of the chunks.
        ended: Called once, when nothing more is sent.
        unread_s: How many seconds the client may take for 64 KiB.
        on_unread: Called before `ended` if the client was cut off because it did not read.
    """

    def __init__(
        self,
        chunks: Source,
        media_type: str,
        room: StreamRoom,
        *,
        ended: Callable[[], None],
        unread_s: float = 60.0,
        on_unread: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(b"", 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type)
        del self.headers["content-length"]
        self._chunks = chunks
        self._room = room
        self._ended = ended
        self._unread_s = unread_s
        self._on_unread = on_unread
        self._sending_since: float | None = None
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks until the source ends, or the client disconnects or stops reading."""
        scope[IS_STREAM] = True
        if self.media_type == EVENT_STREAM and SEND_BUFFER in scope:
            scope[SEND_BUFFER](SEND_BUFFER_BYTES, self._unread_s)
        try:
            sending = asyncio.create_task(self._send_all(send))
            leaving = asyncio.create_task(_left(receive))
            try:
                await self._wait(sending, leaving)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)
            if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                # The answer has begun, so it can only be broken off.
                raise error
        finally:
            scope[IS_STREAM] = False
            if not self._is_whole and ABORT in scope:
                # Otherwise the unsent bytes would stay in memory until the client disconnects.
                scope[ABORT]()
            self._room.close()
            self._ended()

    async def _wait(self, sending: asyncio.Task[None], leaving: asyncio.Task[None]) -> None:
        """Wait until all is sent, or the client has left or stopped reading."""
        while True:
            check_s = min(_CHECK_S, self._unread_s / 4)
            done, _ = await asyncio.wait(
                {sending, leaving}, timeout=check_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            unread_s = 0.0 if self._sending_since is None else time.monotonic() - self._sending_since
            is_crowded = self._room.is_wanted and unread_s >= _CROWDED_S
            if unread_s >= self._unread_s or is_crowded:
                log.info("stream_not_read", seconds=round(unread_s, 1), others_wait=is_crowded)
                self._on_unread()
                return

    async def _send_all(self, send: Send) -> None:
        try:
            await self._put(
                send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                async with aclosing(self._chunks(self._room.reserve)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        await self._send_chunk(send, chunk)
            except NoRoomError:
                if self.media_type == EVENT_STREAM:
                    await self._send_chunk(send, _NO_ROOM)
            await self._put(send, {"type": "http.response.body", "body": b"", "more_body": False})
            self._is_whole = True
        except OSError:
            return

    async def _send_chunk(self, send: Send, chunk: bytes) -> None:
        """Send a chunk in pieces. A long one is in memory until the client has read nearly all of it."""
        if len(chunk) <= CHUNK_BYTES:
            await self._put(send, {"type": "http.response.body", "body": chunk, "more_body": True})
            return
        self._room.resize(len(chunk))
        whole = memoryview(chunk)
        for start in range(0, len(whole), CHUNK_BYTES):
            piece = whole[start : start + CHUNK_BYTES]
            await self._put(send, {"type": "http.response.body", "body": piece, "more_body": True})
        # Waits until the connection has sent the last piece.
        await self._put(send, {"type": "http.response.body", "body": b"", "more_body": True})
        self._room.release()

    async def _put(self, send: Send, message: Message) -> None:
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
