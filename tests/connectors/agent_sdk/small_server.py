"""A small HTTP server on a thread, whose answers a test writes byte by byte."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trunkline_agent.credentials import HubAccess

Handler = Callable[["Heard", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Heard:
    """One request that the server got."""

    connection: int
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class SmallServer:
    """A server that calls `handler` for each request, which writes the answer itself."""

    handler: Handler
    scheme: str = "http"
    port: int = 0
    heard: list[Heard] = field(default_factory=list)
    connections: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def access(self) -> HubAccess:
        return HubAccess(f"{self.scheme}://127.0.0.1:{self.port}", "the-token")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode().split("\r\n")
                method, target, _ = first.split(" ")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (one.partition(":") for one in lines if one)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                found = Heard(number, method, target, headers, body)
                self.heard.append(found)
                await self.handler(found, writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


def answer(status: int = 200, body: bytes = b"{}", *headers: str) -> bytes:
    """The bytes of an answer."""
    lines = [f"HTTP/1.1 {status} Words", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def always(*answers: bytes) -> Handler:
    """A handler that gives one answer after the other, and the last one for ever."""
    left = list(answers)

    async def handle(_: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()

    return handle


@contextmanager
def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> Iterator[SmallServer]:
    """Run a server on a thread until the end of the block."""
    server, started, loop = SmallServer(handler), threading.Event(), asyncio.new_event_loop()
    if tls is not None:
        server.scheme = "https"
    stop = asyncio.Event()

    async def run() -> None:
        found = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
        server.port = found.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        found.close()
        for writer in server.writers:  # a client may never answer the end of TLS
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(asyncio.sleep(0), *tasks, return_exceptions=True)

    def main() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=main)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
