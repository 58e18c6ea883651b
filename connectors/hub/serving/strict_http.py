"""uvicorn's HTTP protocol over httptools, which reads one request at a time and refuses what is ambiguous.

The parser of httptools has no limit of a head and reads all requests of a buffer at once. It also accepts some
messages that two servers could understand differently (request smuggling, RFC 9112, sections 6.3 and 11.2).
Therefore `StrictHttp` cuts the bytes into heads and bodies itself. The parser gets a head when it is complete.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final, Literal
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

# The most bytes of a head, and of what is between two parts of a chunked body or after the last one.
HEAD_BYTES: Final = 16 * 1024
_HIGH_WATER_BYTES: Final = 65536
# The most digits of a length. int() refuses over 4,300.
_LENGTH_DIGITS: Final = 19
_END: Final = b"\r\n\r\n"
_BARE_END: Final = re.compile(rb"\n\r?\n")
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
# The absolute form of a target, which a client sends that takes us for its proxy (RFC 9112, section 3.2.2).
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)([/?].*)?", re.IGNORECASE)
_PROTOCOLS: Final = {b" HTTP/1.0": "1.0", b" HTTP/1.1": "1.1"}
_INVALID: Final = "Invalid HTTP request received."

Reading = Literal["head", "body", "nothing"]


class _RefusedError(Exception):
    """A request that is not served. `status` is the status of the answer."""

    def __init__(self, status: int, why: str = _INVALID) -> None:
        super().__init__(why)
        self.status = status


class StrictHttp(HttpToolsProtocol):
    """One HTTP connection of uvicorn, whose requests are read and answered one after the other.

    The bytes of a further request wait unread, while no more are received. A malformed or ambiguous request is
    answered with status 400, 431 or 501, and the connection is closed. A request for another protocol
    (`Upgrade`) is served as an ordinary one.

    Attributes:
        reading: The part of a request that is expected next, or `nothing` until the present one is answered.
        unread: The bytes that have arrived and belong to no part that is complete.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reading: Reading = "head"
        self.unread = bytearray()
        self._left: int | None = None  # of a body with Content-Length, None for a chunked one
        self._between = 0  # bytes since the last part of a chunked body
        self._method = ""
        self._keeps_alive = False
        self._is_whole = False
        self._may_skip_line = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the connection. asyncio calls it."""
        super().connection_made(transport)
        self.flow = _BoundedReading(self)

    def data_received(self, data: bytes) -> None:
        """Read the next part of a request. asyncio calls it."""
        self._unset_keepalive_if_required()
        self.unread += data
        self._advance()

    def on_message_begin(self) -> None:
        """Prepare for the head of a request. The parser calls it."""
        if self.reading != "head" or self.url:
            raise _RefusedError(400)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header. The parser calls it, also for the trailers of a chunked body, which are ignored."""
        if self.reading == "head":
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Take what the parser knows of the head only until the message ends. The parser calls it."""
        self._method = self.parser.get_method().decode("ascii")
        self._keeps_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Hand a part of the body to the application. Parts that come after the answer are dropped."""
        self._between = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > _HIGH_WATER_BYTES:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Note that the request has arrived. The parser calls it."""
        self._is_whole = True

    def on_response_complete(self) -> None:
        """Go on with the next request, whose bytes may have arrived. uvicorn calls it after each answer."""
        is_next = self.reading == "nothing"
        if is_next:
            self.reading = "head"
        super().on_response_complete()
        if is_next:
            self._advance()

    def prepared(self, cycle: RequestResponseCycle) -> None:
        """Change a new request, for example its scope, before the application gets it."""

    def _advance(self) -> None:
        """Read parts of a request from the bytes that have arrived, until it is complete or more must come."""
        if self.transport.is_closing():
            self.unread.clear()
            return
        try:
            while self.unread and self.reading != "nothing":
                if not (self._read_head() if self.reading == "head" else self._read_body()):
                    return
        except _RefusedError as refused:
            self._refuse(refused.status, str(refused))
        except httptools.HttpParserError:
            self._refuse(400, _INVALID)
        if self.unread:
            self.flow.pause_reading()

    def _read_head(self) -> bool:
        """Start the application if the head is complete. Otherwise return False."""
        unread = self.unread
        if self._may_skip_line and bytes(unread[:2]) in (b"\r", b"\r\n"):
            # One empty line before a request, which some clients send after a body (RFC 9112, section 2.2).
            if len(unread) == 1:
                return False
            del unread[:2]
            self._may_skip_line = False
            if not unread:
                return False
        end = unread.find(_END) + len(_END)
        is_open = end < len(_END)
        if unread[0] <= 0x20 or (is_open and _BARE_END.search(unread)):
            raise _RefusedError(400)
        if (len(unread) if is_open else end) > HEAD_BYTES:
            raise _RefusedError(431, f"the head of a request has at most {HEAD_BYTES} bytes")
        if is_open:
            return False
        head = bytes(unread[:end])
        del unread[:end]
        self._may_skip_line = True
        self._unset_keepalive_if_required()
        self._parse(head)
        self._start(head[: head.index(b"\r\n")])
        return True

    def _parse(self, head: bytes) -> None:
        self._forget()
        try:
            self.parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            # The parser believes that another protocol follows. None does: the request is an ordinary one.
            self._forget()
            self.parser = httptools.HttpRequestParser(self)
            try:
                self.parser.feed_data(_UPGRADE.sub(b"", head))
            except httptools.HttpParserUpgrade:
                raise _RefusedError(501, "the method CONNECT is not supported") from None

    def _forget(self) -> None:
        self.url, self.headers, self._method, self._is_whole, self._between = b"", [], "", False, 0

    def _start(self, request_line: bytes) -> None:
        """Check a head that the parser has accepted, and start the application."""
        version = _PROTOCOLS.get(request_line[-9:])
        fields = dict(self.headers)
        self._left = self._body_bytes(version, fields)
        # The parser accepts several spaces between the three words of the line.
        expected = len(self._method) + 1 + len(self.url) + len(b" HTTP/1.1")
        if version is None or not self._method or not self.url.isascii() or len(request_line) != expected:
            raise _RefusedError(400)
        raw_path, _, query = self._origin_form().partition(b"?")
        root = self.root_path
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": self._method,
            "root_path": root,
            "path": root + unquote(raw_path.decode("ascii")),
            "raw_path": root.encode("ascii") + raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        kind = _Answer if version == "1.1" else _AnswerOfHttp10
        self.cycle = kind(
            scope=self.scope,
            transport=_JoinedWrites(self.transport, self.loop),  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=version == "1.1" and fields.get(b"expect", b"").lower() == b"100-continue",
            keep_alive=version == "1.1" and self._keeps_alive,
            on_response=self.on_response_complete,
        )
        self.prepared(self.cycle)
        self._start_asgi_task(self.cycle, self.app)
        self.reading = "body"
        if self._is_whole:
            self._end_request()

    def _origin_form(self) -> bytes:
        """Return path and query of the target. The host of a target in absolute form replaces the header."""
        if self.url.startswith((b"/", b"*")):
            return self.url
        found = _ABSOLUTE.fullmatch(self.url)
        if found is None:
            raise _RefusedError(400)
        authority, rest = found.groups()
        self.headers = [(b"host", authority), *(one for one in self.headers if one[0] != b"host")]
        return b"/" + rest.removeprefix(b"/") if rest else b"/"

    def _body_bytes(self, version: str | None, fields: dict[bytes, bytes]) -> int | None:
        """Return the length of the body, None for a chunked one. Refuse a head from which it is not clear."""
        names = [name for name, _ in self.headers]
        hosts = names.count(b"host")
        if hosts > 1 or (version == "1.1" and not hosts):
            raise _RefusedError(400)
        if b"transfer-encoding" not in fields:
            length = fields.get(b"content-length", b"0")
            if not length.isdigit() or len(length) > _LENGTH_DIGITS:
                raise _RefusedError(400)
            return int(length)
        if version != "1.1" or b"content-length" in fields or names.count(b"transfer-encoding") > 1:
            raise _RefusedError(400)
        if fields[b"transfer-encoding"].lower() != b"chunked":
            raise _RefusedError(501, "the only supported Transfer-Encoding is chunked")
        return None

    def _read_body(self) -> bool:
        """Feed the parser with bytes of the body. Return False if none of them can be used yet."""
        unread = self.unread
        if self._left is not None:
            size = min(len(unread), self._left)
            self._left -= size
        else:
            # A chunked message ends with this end. Its last bytes may be missing, so three bytes wait for more.
            end = unread.find(_END)
            size = end + len(_END) if end >= 0 else len(unread) - len(_END) + 1
            if size > HEAD_BYTES:
                # The end that was found stays whole in the rest.
                size = min(HEAD_BYTES, size - len(_END))
        if size <= 0:
            return False
        part = unread[:size]
        del unread[:size]
        self._between += size
        self.parser.feed_data(part)
        if self._left is None and self._between > HEAD_BYTES:
            raise _RefusedError(400, f"the lines between two chunks have at most {HEAD_BYTES} bytes")
        if self._is_whole:
            self._end_request()
        return True

    def _end_request(self) -> None:
        cycle = self.cycle
        cycle.more_body = False
        cycle.message_event.set()
        self.reading = "nothing"
        if cycle.response_complete:
            # The client has its answer and sent the rest of the body since. Its idle time begins.
            self.reading = "head"
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _refuse(self, status: int, why: str) -> None:
        """Answer with a status, unless the answer of the application has begun, and close the connection."""
        self.logger.warning(_INVALID)
        self.unread.clear()
        is_answered = False
        if self.reading == "body":
            is_answered = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not is_answered:
            text = why.encode()
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: "
                + b"%d\r\n\r\n%b" % (len(text), text)
            )
        self.transport.close()


class _BoundedReading(FlowControl):
    """Receives no more bytes while many wait unread, also if the application asks for the end of its client.

    To learn that end, uvicorn receives further bytes. Each question of the application would admit as many as
    one read has. A client is therefore found to have disconnected only if it sent few bytes after its request.
    """

    def __init__(self, connection: StrictHttp) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        """Receive bytes again. The application and uvicorn call it."""
        connection = self._connection
        if connection.reading != "nothing" or len(connection.unread) <= HEAD_BYTES:
            super().resume_reading()


class _Answer(RequestResponseCycle):
    """An answer, which ends the connection if the client still waits for leave to send its body.

    Such a client (`Expect: 100-continue`) may leave the body out after an answer. Then its next request would
    be read as the body (RFC 9110, section 10.1.1).
    """

    async def send(self, message: Any) -> None:
        """Send the head of the answer, or a part of its body. The application calls it."""
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False
        await super().send(message)


class _AnswerOfHttp10(RequestResponseCycle):
    """An answer for HTTP/1.0, which knows no chunks. A body without a length ends with the connection."""

    _has_length = True

    async def send(self, message: Any) -> None:
        """Send the head of the answer, or a part of its body. The application calls it."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _JoinedWrites:
    """The transport of one answer, which sends its head together with the part that follows at once.

    A system call costs more than most of the answer's other steps. The head of a stream, which has nothing to
    send yet, waits for the next turn of the event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None  # None before the first write

    def write(self, data: bytes) -> None:
        """Send bytes of the answer, or keep them if they are the first ones."""
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._flush)
            return
        head, self._head = self._head, b""
        self._transport.write(head + data if head else data)

    def close(self) -> None:
        """Send all bytes, then close the connection."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection is being closed."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")
