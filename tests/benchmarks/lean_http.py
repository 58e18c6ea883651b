"""An HTTP/1.1 client that costs little: a thousand connections in one asyncio program.

It knows what our gateway and the peers of the benchmarks answer: a status line, and a body with its length or
in chunks. A client library costs a quarter of a millisecond per request and more, which a benchmark on a shared
machine would measure.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Final

from tests.broker_processes import LOOPBACK

_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_LINE_END: Final = b"\r\n"


class Broken(ConnectionError):
    """The connection ended before the answer was complete, or could not be opened."""


def request_bytes(
    method: str, path: str, headers: Mapping[str, str], body: bytes = b"", host: str = LOOPBACK
) -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {v}" for name, v in headers.items())]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + _END + body


def _body_of(received: bytearray, head: int) -> tuple[bytes, int] | None:
    """Return the body after the head that ends at `head`, and the end of the answer; None if more must come."""
    begin = head + len(_END)
    if _CHUNKED.search(received, 0, head) is None:
        found = _LENGTH.search(received, 0, head)
        end = begin + (int(found[1]) if found else 0)
        return None if len(received) < end else (bytes(received[begin:end]), end)
    body, size = bytearray(), -1
    while size != 0:
        line = received.find(_LINE_END, begin)
        if line < 0:
            return None
        size, begin = int(received[begin:line], 16), line + len(_LINE_END)
        end = begin + size + len(_LINE_END)
        if len(received) < end:
            return None
        body += received[begin : begin + size]
        begin = end
    return bytes(body), begin


def complete_request(received: bytearray) -> bool:
    """Return whether these bytes are all of a request, whose body has a length."""
    head = received.find(_END)
    return head >= 0 and _body_of(received, head) is not None


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
        found = _body_of(self._received, head)
        if found is None:
            return
        body, end = found
        answer, self._answer = self._answer, None
        if not answer.done():
            answer.set_result((int(self._received[9:12]), body))
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

    def sent(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request; return the future with the status and the body of the answer.

        It has no limit of time, which would cost as much as the request. Raises Broken if the connection has
        ended; the future does so if the connection ends before the answer is complete.
        """
        if self._transport is None or self._transport.is_closing():
            raise Broken("the connection has ended")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    async def ask(self, request: bytes, within_s: float) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the answer.

        Raises Broken if the connection ends before, or the answer is not there within `within_s` seconds.
        """
        try:
            async with asyncio.timeout(within_s):
                return await self.sent(request)
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
