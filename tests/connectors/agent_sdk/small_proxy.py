"""A small HTTP proxy on threads, for which every host is loopback, hosts of a test, and silent addresses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

_HEAD_END = b"\r\n\r\n"


@dataclass
class SmallProxy:
    """A proxy. `asked` has the method and the target of each request that began a connection.

    With a `login`, it refuses connections whose `Proxy-Authorization` is another.
    """

    login: str | None = None
    port: int = 0
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            head = b""
            while _HEAD_END not in head:
                head += client.recv(65536)
            first, _, rest = head.partition(b"\r\n")
            method, target, _ = first.decode().split(" ")
            self.asked.append((method, target))
            if self.login is not None and f"Proxy-Authorization: {self.login}".encode() not in head:
                client.sendall(b"HTTP/1.1 407 Login Wanted\r\nContent-Length: 0\r\n\r\n")
                return
            port = int(target.rpartition(":")[2]) if method == "CONNECT" else urlsplit(target).port
            with socket.create_connection(("127.0.0.1", port or 80)) as server:
                if method == "CONNECT":
                    client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                else:
                    server.sendall(b" ".join([method.encode(), target.encode(), b"HTTP/1.1\r\n"]) + rest)
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join(10)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def proxying(login: str | None = None) -> Iterator[SmallProxy]:
    """Run a proxy until the end of the block."""
    proxy = SmallProxy(login)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.port = listener.getsockname()[1]

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=proxy.serve, args=(client,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@contextmanager
def dropping(host: str, port: int) -> Iterator[None]:
    """Let an address answer no attempt to connect until the end of the block: its queue is full."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(4):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        yield


@contextmanager
def resolving(host: str, addresses: list[str]) -> Iterator[None]:
    """Let a host have these addresses, which are tried in this order, until the end of the block."""
    resolve = socket.getaddrinfo

    def resolved(name: Any, port: Any, *more: Any, **options: Any) -> Any:
        names = addresses if name == host else [name]
        return [one for each in names for one in resolve(each, port, *more, **options)]

    with mock.patch.object(socket, "getaddrinfo", resolved):
        yield
