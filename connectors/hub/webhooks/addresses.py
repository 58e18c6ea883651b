"""The rule which addresses a webhook may have, and a network backend that connects to checked addresses only.

A host name is resolved for each connection, all its addresses are checked, and the connection goes to one of
these same addresses. So a name that changes between check and call (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Final

import httpcore2

from schemas.settings.setting_types import networks_of
from schemas.settings.settings import WebhookSettings
from schemas.streams.webhook.webhooks import url_parts

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# RFC 6052: the last 32 bits of these addresses are the IPv4 address that a translator connects to.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# A slow name server must not take the threads that the gateway needs for other work.
_RESOLVERS: Final = 8
_ADDRESSES_MOST: Final = 8
# The next address is tried after this time without an answer of those before (RFC 8305, section 5).
_NEXT_ADDRESS_S: Final = 0.25


class AddressRefusedError(Exception):
    """A webhook may not be called at its address. The text says why, and names no address."""


class AddressRule:
    """Decides which URLs and addresses may be called, by the section `webhooks` of the settings."""

    def __init__(self, settings: WebhookSettings) -> None:
        self._is_http_allowed = settings.allow_http
        self._networks = networks_of(settings.allow_networks)

    def check_url(self, url: str) -> None:
        """Raise AddressRefusedError if a URL is `http` and may not be, or if its host is a refused address.

        A host name is not resolved: `checked` does this for each connection. The URL has the form that
        `schemas.streams.webhook.webhooks.url_parts` accepts.
        """
        parts = url_parts(url)
        if parts.scheme != "https" and not self._is_http_allowed:
            raise AddressRefusedError("the URL must begin with https (webhooks.allow_http)")
        literal = _literal(parts.host)
        if literal is not None:
            self.check(literal)

    def check(self, address: Address) -> None:
        """Raise AddressRefusedError unless an address is public, or in a network of the settings."""
        both = {address, embedded(address)}
        if any(one in network for one in both for network in self._networks):
            return
        if not all(_is_public(one) for one in both):
            raise AddressRefusedError("its address is private or reserved (webhooks.allow_networks)")

    async def checked(self, host: str, port: int, resolvers: ThreadPoolExecutor) -> list[str]:
        """Resolve a host, check all its addresses, and return up to eight of them.

        IPv6 and IPv4 addresses alternate (RFC 8305, section 4), so one family that does not work costs little.

        Raises AddressRefusedError if one of the addresses is refused, and OSError if the name is unknown.
        """
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        addresses = list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))
        for one in addresses:
            self.check(ipaddress.ip_address(one))
        first = [one for one in addresses if (":" in one) == (":" in addresses[0])]
        second = [one for one in addresses if (":" in one) != (":" in addresses[0])]
        return [one for one in chain(*zip_longest(first, second)) if one is not None][:_ADDRESSES_MOST]


def embedded(address: Address) -> Address:
    """Return the IPv4 address to which an IPv6 address leads, or the address itself if it leads to none.

    These are IPv4-mapped addresses (RFC 4291), 6to4 (RFC 3056), Teredo (RFC 4380) and NAT64 (RFC 6052).
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = None if address.teredo is None else address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or teredo or address


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None or address in _NAT64:
            return True  # the address in it decides
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _literal(host: str) -> Address | None:
    """Return the address that a host is, also in the forms of inet_aton(3), such as 2130706433; else None."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    with suppress(OSError):
        return ipaddress.IPv4Address(socket.inet_aton(host))
    return None


async def _first_connected(
    attempts: Sequence[Callable[[], Coroutine[Any, Any, httpcore2.AsyncNetworkStream]]],
) -> httpcore2.AsyncNetworkStream:
    """Return the first stream of several attempts to connect, and end the others (RFC 8305, section 5).

    Each attempt begins when the one before has failed, or 250 ms after it. Raises the error of the last one.
    """
    failure: BaseException = httpcore2.ConnectError("the host has no address")
    under_way: set[asyncio.Task[httpcore2.AsyncNetworkStream]] = set()
    left = list(attempts)
    connected: list[httpcore2.AsyncNetworkStream] = []
    try:
        while (left or under_way) and not connected:
            if left:
                under_way.add(asyncio.create_task(left.pop(0)()))
            done, under_way = await asyncio.wait(
                under_way, timeout=_NEXT_ADDRESS_S if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                failure = task.exception() or failure
            connected += [task.result() for task in done if task.exception() is None]
    finally:
        for task in under_way:
            task.cancel()
        # One may have connected at this very moment.
        late = await asyncio.gather(*under_way, return_exceptions=True)
        connected += [one for one in late if not isinstance(one, BaseException)]
        for surplus in connected[1:]:
            await surplus.aclose()
    if not connected:
        raise failure
    return connected[0]


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """A network backend of httpcore2 that connects only to addresses which the rule has checked."""

    def __init__(self, rule: AddressRule) -> None:
        self._rule = rule
        self._inner = httpcore2.AnyIOBackend()
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="webhook-names")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve and check a host, and connect to one of its addresses; httpcore2 calls this method.

        TLS and the header `Host` still have the name, because httpcore2 takes both from the URL.

        Raises:
            AddressRefusedError: one of the host's addresses may not be called.
            httpcore2.ConnectError: the name is unknown, or no address accepts a connection.
            httpcore2.ConnectTimeout: `timeout` seconds have passed.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._connect(host, port, local_address, socket_options)
        except TimeoutError:
            raise httpcore2.ConnectTimeout("no connection in time") from None

    async def _connect(
        self,
        host: str,
        port: int,
        local_address: str | None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            addresses = await self._rule.checked(host, port, self._resolvers)
        except OSError:
            raise httpcore2.ConnectError("the host name is unknown") from None
        connect = partial(self._inner.connect_tcp, local_address=local_address, socket_options=socket_options)
        return await _first_connected([partial(connect, address, port) for address in addresses])

    async def sleep(self, seconds: float) -> None:
        """Pause for some seconds; httpcore2 calls this method between attempts to connect."""
        await asyncio.sleep(seconds)
