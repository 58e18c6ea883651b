"""uvicorn's HTTP within a budget of connections, also while they are at their TLS handshake.

An application can cut a connection off (ABORT), and says whose it is (`note_principal`). What was written to a
client that does not read would else be kept until that client goes.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from connectors.gateway.web.answers import BUSY, RETRY_AFTER_S, ApiError
from connectors.gateway.web.connection_budget import ConnectionBudget, Phase, Place
from connectors.gateway.web.strict_request import BODY_TIMEOUT

# In an ASGI scope: a function that ends the connection at once, whatever is still to be sent.
ABORT: Final = "trunkline_abort"
# In an ASGI scope: a function that takes a principal, and returns whether it may have one connection more.
_PRINCIPAL: Final = "trunkline_connection_of"
_IDLE: Final = Phase.IDLE.value


def note_principal(scope: Any, principal: str) -> None:
    """Note that a valid credential of this principal came on the request's connection.

    Raises ApiError: 503 when the principal has too many connections.
    """
    note = scope.get(_PRINCIPAL)
    if note is not None and not note(principal):
        raise ApiError(
            503,
            BUSY,
            "too many connections at once; close some, or come again later",
            {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
        )


class BoundedHttp(H11Protocol):
    """One connection; each request's scope has ABORT, and what `note_principal` and `StrictRequest` need."""

    def __init__(
        self, *, budget: ConnectionBudget, listener: str, place: Place | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._budget = budget
        self._listener = listener
        self._place = place
        self._kept_idle_s = self.timeout_keep_alive
        # A stranger has as long for each further head as for the first one.
        self.timeout_keep_alive = min(self.timeout_keep_alive, math.ceil(budget.limits.head_s))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        if self._place is None:
            self._place = self._budget.take(self, self._listener)
        else:
            self._place.connection = self
        super().connection_made(transport)
        served: Any = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope[ABORT] = transport.abort
            scope[_PRINCIPAL] = self._note_principal
            scope[BODY_TIMEOUT] = self._budget.limits.body_s
            await served(scope, receive, send)

        self.app = app
        if self._place is None:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        if self._place is not None:
            self._budget.give_back(self._place)
        super().connection_lost(exc)

    def phase(self) -> tuple[Phase, Any]:
        """Return the step that the connection is at, with the newest request's cycle."""
        cycle = self.cycle
        if self.transport.is_closing():
            return Phase.CLOSING, None
        if self.flow.write_paused:
            return Phase.UNREAD, cycle
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            is_first = cycle is None or self.conn.trailing_data[0]
            return (Phase.HEAD if is_first else Phase.IDLE), cycle
        return (Phase.BODY if theirs is h11.SEND_BODY else Phase.ANSWERING), cycle

    def cut(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """No further request has come."""
        if not self.transport.is_closing():
            self._budget.count_cut(self._listener, _IDLE)
        super().timeout_keep_alive_handler()

    def _note_principal(self, principal: str) -> bool:
        if self._place is None or not self._budget.authenticate(self._place, principal):
            return False
        self.timeout_keep_alive = self._kept_idle_s
        return True


class TlsEntry(asyncio.Protocol):
    """A connection from its start to the end of its TLS handshake, then handed on to a BoundedHttp.

    asyncio's servers can do TLS themselves, but then the handshakes under way are known to nobody, and their
    number has no bound.
    """

    def __init__(
        self,
        budget: ConnectionBudget,
        listener: str,
        context: ssl.SSLContext,
        http: Callable[[Place], BoundedHttp],
    ) -> None:
        self._budget = budget
        self._listener = listener
        self._context = context
        self._http = http
        self._raw: Any = None
        self._handshake: asyncio.Task[None] | None = None
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._raw = transport
        place = self._budget.take(self, self._listener)
        if place is None:
            self._raw.abort()
            return
        self._handshake = asyncio.get_running_loop().create_task(self._shake_hands(place))

    def data_received(self, data: bytes) -> None:
        """Keep what comes between the handshake's end and the hand-over."""
        self._early += data

    def phase(self) -> tuple[Phase, Any]:
        """A connection without a head yet."""
        return Phase.HEAD, None

    def cut(self) -> None:
        """End the connection at once."""
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
        except OSError:  # no TLS, none that we speak, too late, or gone
            self._raw.abort()
        finally:
            if secure is None or secure.is_closing() or not place.is_open:
                self._budget.give_back(place)
                self._raw.abort()
        if not place.is_open or secure is None:
            return
        http = self._http(place)
        secure.set_protocol(http)
        http.connection_made(secure)
        if self._early:
            http.data_received(bytes(self._early))
