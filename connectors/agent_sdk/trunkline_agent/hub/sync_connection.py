"""One connection of the sync client: a socket, TLS over it, and the HTTP of `HttpExchange`."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from trunkline_agent.hub.http_exchange import HttpExchange, ProtocolFault, RequestHead
from trunkline_agent.hub.hub_address import HubAddress, Proxy, ProxyFault
from trunkline_agent.hub.plans import Answer, Request
from trunkline_agent.sockets import connected

if TYPE_CHECKING:
    import ssl

_READ_BYTES: Final = 256 * 1024


class SyncConnection:
    """A connection to a hub, which one thread uses at a time.

    Args:
        address: The address.
        head: The headers of each request.
        trust: The TLS context. None: plain HTTP.
        connect: Returns a connected socket before a moment of the monotonic clock, such as that of a Unix
            socket. None: it connects to the address by TCP.

    Attributes:
        http: Its HTTP.
        is_open: Whether it was opened.
    """

    def __init__(
        self,
        address: HubAddress,
        head: RequestHead,
        trust: ssl.SSLContext | None,
        connect: Callable[[float], socket.socket] | None = None,
    ) -> None:
        self.http = HttpExchange(head)
        self.is_open = False
        self._address = address
        self._trust = trust
        self._connect = connect or self._connect_by_tcp
        self._socket: socket.socket | None = None
        self._is_interrupted = False
        self._poll: select.poll | None = None

    def open(self, timeout_s: float) -> None:
        """Connect within a time. Raises OSError."""
        until = time.monotonic() + timeout_s
        self._socket = found = self._connect(until)
        if self._trust is not None:
            if self._address.proxy is not None:
                self._tunnel(found, self._address.proxy, until)
            found.settimeout(max(0.001, until - time.monotonic()))
            self._socket = found = self._trust.wrap_socket(found, server_hostname=self._address.host)
        self._poll = select.poll()
        self._poll.register(found, select.POLLIN)
        self.is_open = True
        if self._is_interrupted:
            raise ConnectionAbortedError("the client is closed")

    def _connect_by_tcp(self, until: float) -> socket.socket:
        try:
            found = connected(*self._address.peer, until)
        except UnicodeError as error:
            raise OSError(f"not a name of a host: {error}") from None
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def _tunnel(self, found: socket.socket, proxy: Proxy, until: float) -> None:
        """Let the proxy connect to the hub."""
        found.settimeout(max(0.001, until - time.monotonic()))
        found.sendall(proxy.connect_request(self._address.authority))
        answer = b""
        while not proxy.is_connected(answer):
            found.settimeout(max(0.001, until - time.monotonic()))
            # One byte after the other would be slow, and the hub says nothing before its TLS has a request.
            if not (part := found.recv(_READ_BYTES)):
                raise ProxyFault("the proxy closed the connection without an answer to CONNECT")
            answer += part

    def is_alive(self) -> bool:
        """Return whether a request may be sent over the connection that was kept.

        A server that has closed it, or has sent bytes that belong to no request, makes it readable.
        """
        found, poll = self._socket, self._poll
        if found is None or poll is None:
            return False
        if not poll.poll(0):
            return True
        if self._trust is None:
            return False
        # TLS 1.3 sends session tickets after the handshake, which are no data.
        try:
            found.settimeout(0)
            found.recv(1)
        except OSError as error:
            import ssl

            return isinstance(error, ssl.SSLWantReadError)
        return False

    def send(self, request: Request, timeout_s: float) -> None:
        """Send a request. Raises OSError, which does not mean that the server got nothing."""
        data = self.http.sent(request)
        found = self._open_socket()
        found.settimeout(timeout_s)
        found.sendall(data)

    def receive(self, until: float) -> bool:
        """Wait for bytes of the answer until a moment of the monotonic clock. Return whether it is complete.

        Raises:
            OSError: The connection was lost. TimeoutError: the moment has passed.
            ProtocolFault: The bytes are no HTTP, or ended too early.
        """
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        found = self._open_socket()
        found.settimeout(left_s)
        return self.http.receive(found.recv(_READ_BYTES))

    def answer(self, request: Request, until: float) -> Answer:
        """Send a request and return its whole answer. For the errors see `receive`."""
        try:
            self.send(request, max(0.001, until - time.monotonic()))
        except TimeoutError:
            raise
        except OSError:
            # A server that refuses a long body answers before it has read all of it, and closes.
            with suppress(ProtocolFault):
                while not self.receive(until):
                    pass
                return self.http.answer()
            raise
        while not self.receive(until):
            pass
        return self.http.answer()

    def interrupt(self) -> None:
        """Make each call that another thread has in this connection end with an error."""
        self._is_interrupted = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
            self._socket = None

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection is closed")
        return self._socket
