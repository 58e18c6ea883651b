"""HTTP/1.1 without a socket: the bytes of requests, and answers and events from the bytes that came in.

Server-sent events are read as the standard of HTML describes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import h11

from trunkline_agent.errors import TrunklineError, UsageError
from trunkline_agent.hub.hub_address import HubAddress
from trunkline_agent.hub.plans import Answer, Request

# A drain of large messages is the longest answer. Without a bound, a broken server could fill the memory.
ANSWER_BYTES_MOST: Final = 512 * 1024 * 1024
_HEAD_BYTES_MOST: Final = 64 * 1024
_NO_ANSWER: Final = "it disconnected without sending an answer"
_EVENT_BYTES_MOST: Final = 128 * 1024 * 1024


class ProtocolFault(Exception):
    """The server sent no valid HTTP, or ended the connection within an answer."""


class RequestHead:
    """The headers that each request to one hub has."""

    def __init__(self, address: HubAddress, token: str | None) -> None:
        self.prefix = address.prefix
        fixed = [("Host", address.host_header), ("Accept", "*/*")]
        if address.proxy is not None and not address.is_tls:
            # A proxy is asked for the whole address (RFC 9112, 3.2.2).
            self.prefix = f"http://{address.host_header}{address.prefix}"
            if address.proxy.authorization is not None:
                fixed.append(("Proxy-Authorization", address.proxy.authorization))
        if token is not None:
            if not token or not token.isascii() or not token.isprintable() or " " in token:
                raise UsageError("the token is not valid: it has other characters than visible ASCII")
            fixed.append(("Authorization", f"Bearer {token}"))
        self._fixed = [(name.encode("ascii"), value.encode("ascii")) for name, value in fixed]

    def of(self, request: Request) -> h11.Request:
        """Return the head of a request. Raises UsageError for a header that HTTP cannot carry."""
        headers = [*self._fixed]
        try:
            for name, value in request.headers.items():
                headers.append((name.encode("ascii"), value.encode("ascii")))
            if request.body or request.method not in ("GET", "HEAD"):
                headers.append((b"Content-Length", b"%d" % len(request.body)))
            return h11.Request(method=request.method, target=f"{self.prefix}{request.target}", headers=headers)
        except (UnicodeEncodeError, h11.LocalProtocolError) as error:
            raise UsageError(f"the request cannot be sent: {error}") from None


class HttpExchange:
    """A connection's requests and answers, one after the other. It knows no socket.

    Attributes:
        status: The status of the present answer. None before its head has come.
        headers: Its headers, by names in lower case.
        parts: The parts of its body that have come. A reader of a stream may take them out.
        is_complete: Whether the answer has ended.
        is_untouched: Whether no byte of an answer has come since the request.
    """

    def __init__(self, head: RequestHead) -> None:
        self._head = head
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MOST)
        self._begin()

    def _begin(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.is_complete = False
        self.is_untouched = True
        self._bytes = 0

    def sent(self, request: Request) -> bytes:
        """Return the bytes of a request. The answer to the one before must be complete."""
        self._begin()
        http = self._http
        head = http.send(self._head.of(request))
        if request.body:
            http.send(h11.Data(data=request.body))
        http.send(h11.EndOfMessage())
        # With a Content-Length, h11 sends the body as it is, and nothing at its end.
        return (head or b"") + request.body

    def receive(self, data: bytes) -> bool:
        """Take bytes of the answer, empty at the end of the connection. Return whether the answer is complete.

        Raises:
            ProtocolFault: The bytes are no HTTP, the answer is too long, or the connection ended within it.
        """
        http = self._http
        if data:
            self.is_untouched = False
        elif self.is_untouched:
            raise ProtocolFault(_NO_ANSWER)
        try:
            http.receive_data(data)
            while True:
                event = http.next_event()
                if isinstance(event, h11.Data):
                    self._take(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    self.is_complete = True
                    return True
                elif isinstance(event, h11.Response):
                    self.status = event.status_code
                    self.headers = {
                        name.decode("ascii"): value.decode("latin-1") for name, value in event.headers
                    }
                elif isinstance(event, h11.ConnectionClosed):
                    raise ProtocolFault(_NO_ANSWER)
                elif not isinstance(event, h11.InformationalResponse):
                    return False
        except h11.RemoteProtocolError as error:
            if not data:
                raise ProtocolFault("it closed the connection before the answer was complete") from None
            raise ProtocolFault(str(error)) from None

    def _take(self, part: bytes) -> None:
        self._bytes += len(part)
        if self._bytes > ANSWER_BYTES_MOST:
            raise ProtocolFault(f"the answer has more than {ANSWER_BYTES_MOST} bytes")
        self.parts.append(part)

    def answer(self) -> Answer:
        """Return the complete answer."""
        parts = self.parts
        return Answer(self.status or 0, self.headers, parts[0] if len(parts) == 1 else b"".join(parts))

    @property
    def unread_bytes(self) -> int:
        """The number of bytes of the body that have come and were not taken out."""
        return self._bytes

    def take_parts(self) -> bytes:
        """Return the bytes of the body that have come, and forget them."""
        found = b"".join(self.parts)
        self.parts.clear()
        self._bytes = 0
        return found

    def reuse(self) -> bool:
        """Make the connection ready for the next request. Return whether it can have one."""
        http = self._http
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE or http.trailing_data[0]:
            return False
        http.start_next_cycle()
        return True


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event.

    Attributes:
        name: Its name.
        data: Its text.
        id: The id from which a later stream goes on (`Last-Event-ID`), None without one.
    """

    name: str
    data: str
    id: str | None

    def json(self) -> Any:
        """Return the JSON of the data as Python values. Raises TrunklineError if it is not JSON."""
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError):
            raise TrunklineError(
                "the stream is not that of a Trunkline gateway", reason="not_a_gateway"
            ) from None


class EventParser:
    """A parser of a stream's bytes into events. Comments, which keep a silent stream alive, are left out."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0
        self._end = b""

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Take more bytes, and return the events that are complete now.

        Raises:
            TrunklineError: An event is longer than 128 MiB.
        """
        self._parts.append(data)
        self._bytes += len(data)
        # The bytes that a blank line across two parts has in the earlier one.
        near = self._end + data
        self._end = near[-3:]
        if b"\n\n" not in near and b"\n\r\n" not in near:
            # A long event comes in many parts, which are joined once.
            if self._bytes > _EVENT_BYTES_MOST:
                raise TrunklineError(f"an event of the stream has more than {_EVENT_BYTES_MOST} bytes")
            return []
        *blocks, rest = b"".join(self._parts).replace(b"\r\n", b"\n").split(b"\n\n")
        self._parts, self._bytes = [rest], len(rest)
        return [event for event in map(_event_of, blocks) if event is not None]


def _event_of(block: bytes) -> ServerEvent | None:
    name, event_id, data = "message", None, []
    for line in block.decode("utf-8", "replace").split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            event_id = value
    return ServerEvent(name or "message", "\n".join(data), event_id) if data else None
