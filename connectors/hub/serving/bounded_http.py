"""uvicorn's HTTP protocol within a budget of connections, which also covers TLS handshakes.

An application can abort a connection (`ABORT`), because the bytes written to a client that does not read would
otherwise stay in memory until it disconnects. `note_principal` records the owner of a connection.
`HeadRequests` answers HEAD like GET (RFC 9110, sections 9.1 and 9.3.2).
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import struct
from collections.abc import Callable, Container
from functools import partial
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from connectors.hub.serving.answers import crowded
from connectors.hub.serving.connection_budget import ConnectionBudget, Phase, Place
from connectors.hub.serving.strict_http import StrictHttp
from connectors.hub.serving.strict_request import BODY_TIMEOUT, WHOLE_BODY
from connectors.plumbing.network.sockets import UNANSWERED_MS, peer_answers

# The key of an ASGI scope for a function that ends the connection at once and drops unsent bytes.
ABORT: Final = "trunkline_abort"
# The key for a function that takes a principal and returns whether it may have one more connection.
_PRINCIPAL: Final = "trunkline_connection_of"
# The key that is true while an answer ends by itself if its client does not read.
IS_STREAM: Final = "trunkline_is_stream"
# The key for a function that bounds the bytes, and the time, that the kernel keeps for a slow client.
SEND_BUFFER: Final = "trunkline_send_buffer"
# The key for a coroutine function that returns whether the client, after a wait, still answers.
PEER_ANSWERS: Final = "trunkline_peer_answers"
# The key for a function that begins the time of a body anew, because a part of it has come.
BODY_PROGRESS: Final = "trunkline_body_progress"
_IDLE: Final = Phase.IDLE.value
_NO_BODY: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": False}


def note_principal(scope: Any, principal: str, *, is_operator: bool = False) -> None:
    """Record that a request on this connection had a valid credential of a principal.

    The connection then counts as the principal's own in the connection budget. `scope` is the ASGI scope of the
    request. On a server without budgets, nothing happens.

    Raises:
        ApiError: 503 if the principal has too many connections and none of them can be closed.
    """
    note = scope.get(_PRINCIPAL)
    if note is not None and not note(principal, is_operator):
        error = crowded("too many connections at once; close some, or try again later")
        error.headers = {**(error.headers or {}), "Connection": "close"}
        raise error


async def peer_is_gone(scope: Any) -> bool:
    """Return whether the client of a request has left, or does not answer a probe within 2 s (DL-52).

    Call it before a message is handed out for good. `scope` is the ASGI scope of the request whose connection
    gets the answer.
    """
    answers = scope.get(PEER_ANSWERS)
    return answers is not None and not await answers()


class BoundedHttp(StrictHttp):
    """One HTTP connection of uvicorn, which has a place in a connection budget.

    The ASGI scope of each request gets keys for aborting the connection, for its principal, and for the body's
    time limit.

    Args:
        budget: The budget that counts the connection.
        listener: The name of the listening socket, for the metrics.
        place: The place that the connection took before its TLS handshake. None to take one.
        options: The arguments of uvicorn's HttpToolsProtocol.
    """

    def __init__(
        self, *, budget: ConnectionBudget, listener: str, place: Place | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._budget = budget
        self._listener = listener
        self._place = place
        self._parts = 0
        self._kept_idle_s = self.timeout_keep_alive
        # Before authentication each further head has the time limit of the first one.
        self.timeout_keep_alive = min(self.timeout_keep_alive, math.ceil(budget.limits.head_s))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place in the connection budget. If there is none, abort the connection. asyncio calls it."""
        if self._place is None:
            self._place = self._budget.take(self, self._listener)
        else:
            self._place.connection = self
        super().connection_made(transport)
        if self._place is None:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the connection's place in the budget. asyncio calls it when the connection has ended."""
        if self._place is not None:
            self._budget.give_back(self._place)
        super().connection_lost(exc)

    def prepared(self, cycle: RequestResponseCycle) -> None:
        """Add the keys of this module to the scope of a new request."""
        scope: Any = cycle.scope
        self._parts = 0
        scope[ABORT] = self.cut
        scope[SEND_BUFFER] = self._bound_send_buffer
        scope[PEER_ANSWERS] = partial(peer_answers, self.transport.get_extra_info("socket"))
        scope[_PRINCIPAL] = self._note_principal
        scope[BODY_TIMEOUT] = self._budget.limits.body_s
        scope[WHOLE_BODY] = partial(_whole_body, cycle)
        scope[BODY_PROGRESS] = self._note_part

    def phase(self) -> tuple[Phase, Any]:
        """Return the connection's phase, and an object that identifies the present request.

        The budget compares both with those of its last call. While they are equal, the phase's time limit runs.
        """
        cycle = self.cycle
        if self.transport.is_closing():
            return Phase.CLOSING, None
        if self.flow.write_paused and not (cycle is not None and cycle.scope.get(IS_STREAM)):
            return Phase.UNREAD, cycle
        if self.reading == "head":
            return (Phase.HEAD if cycle is None or self.unread else Phase.IDLE), cycle
        if self.reading == "body":
            return Phase.BODY, (cycle, self._parts) if self._parts else cycle
        return Phase.ANSWERING, cycle

    def cut(self) -> None:
        """Abort the connection at once, without sending the bytes that are still in memory."""
        connection = self.transport.get_extra_info("socket")
        if self.flow.write_paused and connection is not None:
            # The client does not read. Without this the kernel would keep the bytes that it has, for minutes.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Close and count a connection on which no further request came in time. uvicorn's timer calls it."""
        if not self.transport.is_closing():
            self._budget.count_cut(self._listener, _IDLE)
        super().timeout_keep_alive_handler()

    def _bound_send_buffer(self, size: int, unread_s: float) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            # The kernel's time must not end a stream before its own.
            unanswered_ms = max(UNANSWERED_MS, round(1000 * unread_s) + 5000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unanswered_ms)

    def _note_part(self) -> None:
        """Give the body of the present request its time limit anew. The reader of a large body calls it."""
        self._parts += 1

    def _note_principal(self, principal: str, is_operator: bool) -> bool:
        place = self._place
        if place is None or not self._budget.authenticate(place, principal, is_operator=is_operator):
            return False
        self.timeout_keep_alive = self._kept_idle_s
        return True


def _whole_body(cycle: Any) -> bytes | None:
    """Return the body of a request that has arrived, instead of the ASGI `receive`; None if it has not.

    A client that waits for `100 Continue` gets it from `receive`.
    """
    if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    cycle.message_event.clear()
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


class TlsEntry(asyncio.Protocol):
    """A connection during its TLS handshake, with a place in the budget. Afterwards a BoundedHttp takes over.

    asyncio servers can do TLS themselves, but then no budget counts or bounds the handshakes under way. A
    handshake that fails or lasts longer than `head_s` of the budget ends the connection.
    """

    def __init__(
        self,
        budget: ConnectionBudget,
        listener: str,
        context: ssl.SSLContext,
        http: Callable[..., BoundedHttp],
    ) -> None:
        self._budget = budget
        self._listener = listener
        self._context = context
        self._http = http
        self._raw: Any = None
        self._handshake: asyncio.Task[None] | None = None
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place in the connection budget and start the TLS handshake. asyncio calls it.

        If the budget has no place, the connection is aborted.
        """
        self._raw = transport
        place = self._budget.take(self, self._listener)
        if place is None:
            self._raw.abort()
            return
        self._handshake = asyncio.get_running_loop().create_task(self._shake_hands(place))

    def data_received(self, data: bytes) -> None:
        """Keep the bytes that arrive after the handshake, until BoundedHttp takes over. asyncio calls it."""
        self._early += data

    def phase(self) -> tuple[Phase, Any]:
        """Return the phase `HEAD` and None, because no request has been read during the handshake."""
        return Phase.HEAD, None

    def cut(self) -> None:
        """Abort the connection, and with it the handshake, at once."""
        self._raw.abort()

    async def _shake_hands(self, place: Place) -> None:
        loop = asyncio.get_running_loop()
        secure = None
        try:
            secure = await loop.start_tls(
                self._raw,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._budget.limits.head_s,
            )
        except OSError:  # not TLS, an unsupported version, too slow, or disconnected
            self._raw.abort()
        finally:
            if secure is None or secure.is_closing() or not place.is_open:
                self._budget.give_back(place)
                self._raw.abort()
        if not place.is_open or secure is None:
            return
        http = self._http(place=place)
        secure.set_protocol(http)
        http.connection_made(secure)
        if self._early:
            http.data_received(bytes(self._early))


class HeadRequests:
    """ASGI middleware that serves each HEAD as the GET of the same path, and sends the head of its answer.

    A stream ends at once, because its client counts as disconnected. Place it inside the access log, which then
    logs and counts the request as HEAD.

    Args:
        app: The application.
        unsafe_paths: Paths on which GET changes something. HEAD is left to the application there.
    """

    def __init__(self, app: ASGIApp, unsafe_paths: Container[str] = ()) -> None:
        self._app = app
        self._unsafe_paths = unsafe_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, a HEAD as GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] in self._unsafe_paths:
            await self._app(scope, receive, send)
            return
        is_sent = False

        async def send_head(message: Message) -> None:
            nonlocal is_sent
            if is_sent or message["type"] != "http.response.start":
                return
            is_sent = True
            scope["method"] = "HEAD"  # the server looks at it, too: this answer has no chunks
            await send(message)
            await send(_NO_BODY)

        # A stream that is broken off aborts its connection. This one is at its end.
        scope.pop(ABORT, None)
        scope["method"] = "GET"
        try:
            await self._app(scope, receive, send_head)
        finally:
            scope["method"] = "HEAD"
