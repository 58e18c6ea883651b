"""HTTP connections whose usual requests are answered at once, without the steps of ASGI.

A request is usual if it has arrived whole, has plain headers, each once, and is for an operation of the engine.
All others go, with their bytes, to `BoundedHttp`, which words the refusals. The two answer with equal bytes.
"""

from __future__ import annotations

import re
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from connectors.gateway.engine.engine import Engine
from connectors.gateway.engine.operation import Exchange
from connectors.gateway.web.bounded_http import BoundedHttp
from connectors.gateway.web.connection_budget import Phase
from connectors.gateway.web.strict_http import HEAD_BYTES
from connectors.tcp_peers.peer_probe import is_heard

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


class DirectHttp(BoundedHttp):
    """One HTTP connection that answers usual requests by the engine, and all others as `BoundedHttp`.

    Args:
        engine: The engine.
        options: The arguments of `BoundedHttp`.
    """

    def __init__(self, *, engine: Engine, **options: Any) -> None:
        super().__init__(**options)
        self._engine = engine
        self._exchange: Exchange | None = None
        self._served = 0
        self._ends = False

    def data_received(self, data: bytes) -> None:
        """Answer a usual request, or read the next part of another one. asyncio calls it."""
        if self.reading == "head" and not self.unread and self._begin(data):
            return
        super().data_received(data)

    def phase(self) -> tuple[Phase, Any]:
        """Return the connection's phase, and an object that identifies the present request."""
        if self._exchange is not None and not self.transport.is_closing():
            return Phase.ANSWERING, self._exchange
        phase, request = super().phase()
        if request is None and self._served:
            request = self._served
            if phase is Phase.HEAD and not self.unread:
                phase = Phase.IDLE
        return phase, request

    def shutdown(self) -> None:
        """Close the connection, after the answer that is under way. uvicorn calls it when the server ends."""
        if self._exchange is None:
            super().shutdown()
        else:
            self._ends = True

    def is_heard(self) -> bool:
        """Return whether the client was there a moment ago, so that it will most likely get an answer."""
        return is_heard(self.transport.get_extra_info("socket"))

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
        common = b"".join([b"%b: %b\r\n" % one for one in self.server_state.default_headers])
        end = b"connection: close\r\n" if self._ends else b""
        self.transport.write(b"%b%b%b%b\r\n%b" % (STATUS_LINE[status], common, head, end, body))
        if self._ends:
            self.transport.close()
        self.on_response_complete()

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

    def _begin(self, data: bytes) -> bool:
        """Begin a request. Return False, and do nothing, if it is not usual."""
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
            or int(length) != len(data) - end - len(_END)
        ):
            return False
        exchange = Exchange(self, operation, data, path, headers, query, data[end + len(_END) :])
        if not self._engine.admit(exchange):
            return False
        self._unset_keepalive_if_required()
        self.reading = "nothing"
        self._served += 1
        self.cycle = None  # type: ignore[assignment]  # an earlier request, which says nothing of this one
        self._exchange = exchange
        self._engine.begin(exchange)
        return True
