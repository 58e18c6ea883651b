"""A server of the gateway on a socket of its own, with an ASGI application of the test, and clients for it."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from connectors.hub.serving.bounded_http import BoundedHttp
from connectors.hub.serving.connection_budget import SWEEP_S
from connectors.programs.gateway_program.application import Door
from connectors.programs.gateway_program.http_server import Budgets, HttpServer, bound_socket
from schemas.settings.settings import GatewaySettings
from tests.broker_processes import LOOPBACK, wait_until

HOST = b"Host: a\r\n"
CHUNKED = b"POST /first HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
# The application gets it only if the server agrees with the client where the request before it ends.
LAST = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def get(*headers: bytes, line: bytes = b"GET /first HTTP/1.1", host: bytes = HOST) -> bytes:
    return line + b"\r\n" + host + b"".join(one + b"\r\n" for one in headers) + b"\r\n"


def post(*headers: bytes, body: bytes = b"body") -> bytes:
    return get(*headers, line=b"POST /first HTTP/1.1") + body


def statuses(answers: bytes) -> list[int]:
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answers)]


class Served:
    """A server that runs in a thread. `connections` are its open connections."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.port = port

    @property
    def connections(self) -> set[BoundedHttp]:
        return self.server.server_state.connections

    def only_connection(self) -> BoundedHttp:
        wait_until(lambda: len(self.connections) == 1, what="the only connection")
        (found,) = self.connections
        return found

    def connect(self) -> socket.socket:
        found = socket.create_connection((LOOPBACK, self.port), timeout=10)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def exchange(self, sent: bytes, piece: int = 0) -> bytes:
        """Send bytes, in pieces of some bytes if given, and return all that comes until the connection ends."""
        with self.connect() as connection:
            try:
                for start in range(0, len(sent), piece or len(sent)):
                    connection.sendall(sent[start : start + (piece or len(sent))])
                    if piece:
                        time.sleep(0.0003)
            except ConnectionError:
                pass  # refused before its end
            return rest(connection)


def rest(connection: socket.socket) -> bytes:
    """Return all that comes until the connection ends."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


@contextmanager
def served(
    app: Any, settings: GatewaySettings | None = None, idle_timeout_s: int = 5, engine: Any = None
) -> Iterator[Served]:
    """Serve an application for the length of the block, with the limits of these settings, behind an engine."""
    made: list[Served] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        door = Door("test", app, LOOPBACK, 0, "test", engine=engine)
        budgets = Budgets(settings or GatewaySettings(), 1, loop.time)

        def sweep() -> None:
            loop.call_later(SWEEP_S, sweep)
            budgets.sweep()

        sweep()
        with bound_socket(door) as listener:
            server = HttpServer(door, None, budgets, idle_timeout_s)
            made.append(Served(server, listener.getsockname()[1]))
            await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        wait_until(lambda: bool(made) and made[0].server.started, what="the server")
        yield made[0]
    finally:
        made[0].server.should_exit = True
        thread.join(30)
