"""One connection of the async client: a protocol of asyncio over the HTTP of `HttpExchange`."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, cast

from trunkline_agent.hub.http_exchange import HttpExchange, ProtocolFault, RequestHead
from trunkline_agent.hub.hub_address import HubAddress, Proxy, ProxyFault
from trunkline_agent.hub.plans import Answer, Request
from trunkline_agent.sockets import ATTEMPT_DELAY_S

if TYPE_CHECKING:
    import ssl

# A stream whose reader is slow reads no further beyond so many bytes.
_UNREAD_MOST: Final = 1024 * 1024


class AsyncConnection(asyncio.Protocol):
    """A connection to a hub, which one task uses at a time.

    Attributes:
        http: Its HTTP.
        is_alive: Whether a request may be sent over it.
    """

    def __init__(self, head: RequestHead) -> None:
        self.http = HttpExchange(head)
        self.is_alive = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._is_stream = False
        self._is_paused = False
        self._is_complete = False
        self._fault: Exception | None = None

    async def open(self, address: HubAddress, trust: ssl.SSLContext | None, timeout_s: float) -> None:
        """Connect within a time. Raises OSError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if trust is not None and address.proxy is not None:
                    await self._open_tunnel(address, address.proxy, trust)
                    return
                await loop.create_connection(
                    lambda: self,
                    *address.peer,
                    ssl=trust,
                    server_hostname=None if trust is None else address.host,
                    happy_eyeballs_delay=ATTEMPT_DELAY_S,
                )
        except UnicodeError as error:
            raise OSError(f"not a name of a host: {error}") from None
        except TimeoutError:
            raise TimeoutError("timed out") from None

    async def _open_tunnel(self, address: HubAddress, proxy: Proxy, trust: ssl.SSLContext) -> None:
        """Let the proxy connect to the hub, and begin TLS over it."""
        loop = asyncio.get_running_loop()
        tunnel = Tunnel(proxy, address.authority)
        await loop.create_connection(lambda: tunnel, *address.peer, happy_eyeballs_delay=ATTEMPT_DELAY_S)
        raw = await tunnel.connected()
        try:
            found = await loop.start_tls(raw, self, trust, server_hostname=address.host)
        except BaseException:
            raw.abort()
            raise
        self.connection_made(cast("asyncio.BaseTransport", found))

    async def answer(self, request: Request, timeout_s: float) -> Answer:
        """Send a request and return its whole answer.

        Raises:
            OSError: The connection was lost. TimeoutError: the time has passed.
            ProtocolFault: The bytes are no HTTP, or ended too early.
        """
        self._write(request)
        await self._received(timeout_s)
        return self.http.answer()

    async def begin_stream(self, request: Request, timeout_s: float) -> bool:
        """Send a request, and return after the first bytes of its answer whether it is complete."""
        self._is_stream = True
        self._write(request)
        return await self._received(timeout_s)

    async def more(self, timeout_s: float) -> bool:
        """Wait for further bytes of a stream. Return whether it is complete. For the errors see `answer`."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        if self._is_complete or self.http.unread_bytes:
            return self._is_complete
        return await self._received(timeout_s)

    def close(self) -> None:
        """Close the connection at once. A request that waits on it ends with an error."""
        self.is_alive = False
        if self._transport is not None:
            self._transport.abort()

    def _write(self, request: Request) -> None:
        data = self.http.sent(request)
        if self._transport is None or not self.is_alive:
            raise ConnectionResetError("the connection is closed")
        self._transport.write(data)

    async def _received(self, timeout_s: float) -> bool:
        if self._fault is not None:
            raise self._fault
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_later(max(0.0, timeout_s), self._fail, TimeoutError("timed out"))
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _fail(self, fault: Exception) -> None:
        self._fault = fault
        self.is_alive = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(fault)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin. asyncio calls it."""
        self._transport = cast("asyncio.Transport", transport)
        found = transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_alive = True

    def data_received(self, data: bytes) -> None:
        """Take bytes of the answer. asyncio calls it."""
        if self._waiter is None and not self._is_stream:
            # They belong to no request: the server says that it closes the connection.
            self.close()
            return
        self._feed(data)
        if self._is_stream and self._transport is not None and self.http.unread_bytes > _UNREAD_MOST:
            self._is_paused = True
            self._transport.pause_reading()

    def _feed(self, data: bytes) -> None:
        try:
            self._is_complete = is_complete = self.http.receive(data)
        except ProtocolFault as error:
            self._fail(error)
            return
        waiter = self._waiter
        if waiter is not None and (is_complete or self._is_stream) and not waiter.done():
            waiter.set_result(is_complete)

    def eof_received(self) -> None:
        """End the answer, if it has no length. asyncio calls it, and then closes the connection."""
        self.is_alive = False
        if not self._is_complete and (self._waiter is not None or self._is_stream):
            self._feed(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request that waits. asyncio calls it."""
        if not self._is_complete or self._waiter is not None:
            self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the connection was closed"))
        self.is_alive = False


class Tunnel(asyncio.Protocol):
    """A connection to a proxy that is asked for one to the hub."""

    def __init__(self, proxy: Proxy, target: str) -> None:
        self._proxy = proxy
        self._target = target
        self._answer = b""
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A connection that is given up has an error that nobody waits for.
        self._done.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def connected(self) -> asyncio.Transport:
        """Return the transport when the proxy has connected it to the hub. Raises OSError."""
        transport = cast("asyncio.Transport", self._transport)
        try:
            await self._done
        except BaseException:
            transport.abort()
            raise
        return transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask the proxy. asyncio calls it."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._proxy.connect_request(self._target))

    def data_received(self, data: bytes) -> None:
        """Take bytes of the proxy's answer. asyncio calls it."""
        self._answer += data
        try:
            if self._proxy.is_connected(self._answer) and not self._done.done():
                self._done.set_result(None)
        except ProxyFault as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail. asyncio calls it."""
        self._end(ProxyFault(str(exc or "the proxy closed the connection without an answer to CONNECT")))

    def _end(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)
