"""HTTP connections whose usual requests are answered at once, without the steps of ASGI, and such a request.

A request is usual if it has plain headers, each once, is for an operation of the engine, and has arrived in one
or two parts. All others go, with their bytes, to `BoundedHttp`, which words the refusals. The two answer with
equal bytes.

An `Exchange` is a usual request on its connection, as a door hands it to its engine.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from connectors.hub.engine.operation import Asked
from connectors.hub.services.mailbox_waits import MailboxWait
from connectors.hub.serving.bounded_http import BoundedHttp
from connectors.hub.serving.connection_budget import Phase
from connectors.hub.serving.policy import Caller
from connectors.hub.serving.strict_http import HEAD_BYTES
from connectors.plumbing.network.sockets import has_left, is_heard, is_near, peer_answers


class Connection(Protocol):
    """The connection of a request."""

    def is_heard(self) -> bool:
        """Return whether the client was there a moment ago."""

    def has_left(self) -> bool:
        """Return whether the client has ended the connection."""

    def admits(self, principal: str, *, is_operator: bool) -> bool:
        """Count the connection as one of a principal. Return False if the principal has too many."""

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Send the answer: its status, the lines of its headers, and its body."""

    async def answers(self) -> bool:
        """Return whether the client is there, after a probe of its machine."""

    async def sent(self) -> None:
        """Wait until most of the answer has left, or the connection has ended."""

    def pass_on(self, exchange: Exchange) -> None:
        """Let the careful path answer."""


class Exchange:
    """A usual request on its connection.

    Attributes:
        connection: Where it came from.
        operation: The operation that it asks for, in the form that the door's engine has found it.
        request: Its bytes.
        path: The values of the path's parameters, in their order.
        headers: Its headers by their names in lower case.
        query: Its query, without the question mark.
        body: Its body.
        caller: Its sender, once it is admitted.
        asked: Its validated values, once there are any.
        began: The time at which it came, by the monotonic clock.
        wait: Its wait for messages, once it has waited.
        timer: The end of its present wait. None: it does not wait now.
        is_probed: Whether the client must answer a probe after the wait.
    """

    __slots__ = (
        "asked",
        "began",
        "body",
        "caller",
        "connection",
        "headers",
        "is_probed",
        "operation",
        "path",
        "query",
        "request",
        "timer",
        "wait",
    )

    caller: Caller
    asked: Asked

    def __init__(
        self,
        connection: Connection,
        operation: Any,
        request: bytes,
        path: Sequence[bytes],
        headers: dict[bytes, bytes],
        query: bytes,
        body: bytes,
    ) -> None:
        self.connection = connection
        self.operation = operation
        self.request = request
        self.path = path
        self.headers = headers
        self.query = query
        self.body = body
        self.began = time.monotonic()
        self.wait: MailboxWait | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_probed = False


class DoorEngine(Protocol):
    """Serves usual requests of a door in the protocol's own callback."""

    def find(self, request_line: bytes) -> tuple[Any, Sequence[bytes], bytes]:
        """Return the operation of a request line, the values of the path's parameters, and the query.

        The operation is None for a request line that the careful path must read.
        """

    def admit(self, exchange: Exchange) -> bool:
        """Find the caller of a request and check its right. Return False if the careful path must do that."""

    def begin(self, exchange: Exchange) -> None:
        """Begin an admitted request when it is its principal's turn."""

    def leave(self, exchange: Exchange) -> None:
        """End a request that waits for messages, because its connection has ended. Another one goes on."""


_END: Final = b"\r\n\r\n"
_PLAIN: Final = re.compile(rb"(?:\r\n[A-Za-z0-9-]{1,64}: [!-~](?:[ -~]*[!-~])?)+").fullmatch
# Without characters that need a look, such as a fragment.
_QUERY: Final = re.compile(rb"[A-Za-z0-9_.~%&=+-]*").fullmatch
# They change how a body is read, or what follows on the connection.
_UNUSUAL: Final = frozenset(
    {b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"content-range", b"range", b"te"}
)
_KEPT: Final = (b"keep-alive", b"Keep-Alive")
_LENGTH_DIGITS: Final = 7
# Many clients send head and body in two writes, so a small body may follow within this time.
_BODY_S: Final = 0.05
_BODY_BYTES: Final = 64 * 1024


class DirectHttp(BoundedHttp):
    """One HTTP connection that answers usual requests by the engine, and all others as `BoundedHttp`.

    Args:
        engine: The engine of the door.
        options: The arguments of `BoundedHttp`.
    """

    _common: ClassVar[tuple[list[tuple[bytes, bytes]], bytes]] = ([], b"")

    def __init__(self, *, engine: DoorEngine, **options: Any) -> None:
        super().__init__(**options)
        self._engine = engine
        self._exchange: Exchange | None = None
        self._served = 0
        # A head whose body may follow at once, and the timer that passes it on otherwise.
        self._head = b""
        self._head_timer: asyncio.TimerHandle | None = None
        self._ends = False
        self._idle_since = 0.0
        self._is_near: bool | None = None

    def data_received(self, data: bytes) -> None:
        """Answer a usual request, or read the next part of another one. asyncio calls it."""
        head = self._taken_head()
        if self.reading == "head" and not self.unread and self._begin(head + data, may_wait=not head):
            return
        super().data_received(head + data)

    def phase(self) -> tuple[Phase, Any]:
        """Return the connection's phase, and an object that identifies the present request."""
        if self._exchange is not None and not self.transport.is_closing():
            return Phase.ANSWERING, self._exchange
        if self._head:
            return Phase.BODY, self._served
        phase, request = super().phase()
        if request is None and self._served:
            request = self._served
            if phase is Phase.HEAD and not self.unread:
                phase = Phase.IDLE
        return phase, request

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait of the present request. asyncio calls it once the connection has ended."""
        if self._exchange is not None:
            self._engine.leave(self._exchange)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection, after the answer that is under way. uvicorn calls it when the server ends."""
        if self._exchange is None:
            self._pass_head_on()
            super().shutdown()
        else:
            self._ends = True

    def is_heard(self) -> bool:
        """Return whether the client was there a moment ago, so that it will most likely get an answer."""
        connection = self.transport.get_extra_info("socket")
        if self._is_near is None:
            self._is_near = is_near(connection)
        return is_heard(connection, is_near=self._is_near)

    def has_left(self) -> bool:
        """Return whether the client has ended the connection."""
        return has_left(self.transport.get_extra_info("socket"))

    async def answers(self) -> bool:
        """Return whether the client is there, after a probe of its machine."""
        return await peer_answers(self.transport.get_extra_info("socket"))

    def admits(self, principal: str, *, is_operator: bool) -> bool:
        """Count the connection as one of a principal. Return False if the principal has too many."""
        return self._note_principal(principal, is_operator)

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Send the answer to the present request.

        Args:
            status: The status.
            head: The lines of the headers, each with its end.
            body: The body.
        """
        self._exchange = None
        if self.transport.is_closing():
            return
        common = self._common_lines()
        end = b"connection: close\r\n" if self._ends else b""
        self.transport.write(b"%b%b%b%b\r\n%b" % (STATUS_LINE[status], common, head, end, body))
        if self._ends:
            self.transport.close()
        self._await_next()

    async def sent(self) -> None:
        """Wait until most of the answer has left, or the connection has ended."""
        await self.flow.drain()

    def pass_on(self, exchange: Exchange) -> None:
        """Let `BoundedHttp` answer the present request after all."""
        self._exchange = None
        if self.transport.is_closing():
            return
        self.reading = "head"
        data = exchange.request + bytes(self.unread)
        self.unread.clear()
        super().data_received(data)
        if self._ends:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it was idle for its time, or look again later. The timer calls it."""
        self.timeout_keep_alive_task = None
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self._exchange is None and left_s <= 0:
            super().timeout_keep_alive_handler()
        elif self._exchange is None:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)

    def _await_next(self) -> None:
        """Go on with the next request, as `on_response_complete`, but keep the timer, which is rarely due."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.reading = "head"
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            after_s = self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(after_s, self.timeout_keep_alive_handler)
        self.flow.resume_reading()
        if self.unread:
            self._advance()

    def _common_lines(self) -> bytes:
        """Return the lines that all answers have. uvicorn makes a new list of them each second."""
        headers = self.server_state.default_headers
        if headers is not self._common[0]:
            DirectHttp._common = (headers, b"".join([b"%b: %b\r\n" % one for one in headers]))
        return self._common[1]

    def _taken_head(self) -> bytes:
        """Return the head that waits for its body, which then waits no longer."""
        head, self._head = self._head, b""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        return head

    def _pass_head_on(self) -> None:
        head = self._taken_head()
        if head:
            super().data_received(head)

    def _begin(self, data: bytes, *, may_wait: bool) -> bool:
        """Begin a request, or wait for its body. Return False, and do nothing, if it is not usual."""
        end = data.find(_END)
        if not 0 < end <= HEAD_BYTES - len(_END) or self.flow.write_paused or self.transport.is_closing():
            return False
        line_end = data.find(b"\r\n")
        operation, path, query = self._engine.find(data[:line_end])
        if operation is None or not _QUERY(query) or not _PLAIN(data, line_end, end):
            return False
        headers: dict[bytes, bytes] = {}
        lines = data[line_end + 2 : end].split(b"\r\n")
        for line in lines:
            name, _, value = line.partition(b": ")
            headers[name.lower()] = value
        length = headers.get(b"content-length", b"0")
        if (
            len(headers) < len(lines)
            or b"host" not in headers
            or not headers.keys().isdisjoint(_UNUSUAL)
            or headers.get(b"connection", b"keep-alive") not in _KEPT
            or not (length.isdigit() and len(length) <= _LENGTH_DIGITS)
        ):
            return False
        lacks = int(length) - (len(data) - end - len(_END))
        if lacks > 0 and may_wait and int(length) <= _BODY_BYTES:
            self._unset_keepalive_if_required()
            self._head, self._head_timer = data, self.loop.call_later(_BODY_S, self._pass_head_on)
            return True
        if lacks:
            return False
        exchange = Exchange(self, operation, data, path, headers, query, data[end + len(_END) :])
        if not self._engine.admit(exchange):
            return False
        self.reading = "nothing"
        self._served += 1
        self.cycle = None  # type: ignore[assignment]  # an earlier request, which says nothing of this one
        self._exchange = exchange
        self._engine.begin(exchange)
        return True
