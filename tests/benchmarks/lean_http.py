"""An HTTP/1.1 client that costs little: a thousand connections in one asyncio program.

It knows what our gateway and the peers of the benchmarks answer: a status line, `Content-Length`, a body. A
client library costs a quarter of a millisecond per request and more, which a benchmark on a shared machine
would measure.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Final

from tests.broker_processes import LOOPBACK

_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Broken(ConnectionError):
    """The connection ended before the answer was complete, or could not be opened."""


def request_bytes(method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {LOOPBACK}", *(f"{name}: {v}" for name, v in headers.items())]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + _END + body


class Connection(asyncio.Protocol):
    """One connection, for one request at a time. `open_connection` makes it."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. asyncio calls it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Complete the answer when all of it has arrived. asyncio calls it."""
        self._received += data
        head = self._received.find(_END)
        if head < 0 or self._answer is None:
            return
        found = _LENGTH.search(self._received, 0, head)
        end = head + len(_END) + (int(found[1]) if found else 0)
        if len(self._received) < end:
            return
        answer, self._answer = self._answer, None
        if not answer.done():
            answer.set_result((int(self._received[9:12]), bytes(self._received[head + len(_END) : end])))
        del self._received[:end]

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request under way. asyncio calls it."""
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Broken("the connection ended"))

    @property
    def is_open(self) -> bool:
        """True if a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, within_s: float) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the answer.

        Raises Broken if the connection ends before, or the answer is not there within `within_s` seconds.
        """
        if self._transport is None or self._transport.is_closing():
            raise Broken("the connection has ended")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(within_s):
                return await self._answer
        except TimeoutError:
            self.close()
            raise Broken(f"no answer within {within_s:g} s") from None

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()


async def open_connection(port: int) -> Connection:
    """Open a connection to a port of this machine. Raises Broken if nothing accepts it."""
    try:
        _, found = await asyncio.get_running_loop().create_connection(Connection, LOOPBACK, port)
    except OSError as error:
        raise Broken(str(error)) from None
    return found
