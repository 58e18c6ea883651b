"""A proxy in front of the hub that records requests, and cuts, holds or answers some of them itself."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

_LOOPBACK: Final = "127.0.0.1"
_UPSTREAM_S: Final = 90.0
_HOLD_S: Final = 60.0
_PER_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "date", "server"}


@dataclass
class Fault:
    """A fault that the next matching requests meet, `times` of them.

    Attributes:
        method: The method of the requests.
        path: A regular expression that the whole path matches, without the query.
        forward: Whether the hub gets the request.
        answer: A status, headers and a JSON body that the client gets instead of the hub's answer. None: the
            connection is reset.
        hold: Whether the connection stays open until `release`, before it is answered or reset.
        times: How many requests meet the fault.
        hit: Set when a request has met the fault: when it came, or with `forward` when the hub has answered.
    """

    method: str
    path: str
    forward: bool = False
    answer: tuple[int, Mapping[str, str], Any] | None = None
    hold: bool = False
    times: int = 1
    hit: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)

    def meets(self, exchange: Exchange) -> bool:
        """Return whether a request meets the fault."""
        return (
            self.times > 0
            and self.method == exchange.method
            and re.fullmatch(self.path, exchange.path) is not None
        )

    def release(self) -> None:
        """Let held requests go on."""
        self._released.set()

    def wait_released(self) -> None:
        """Wait for `release`, a minute at most."""
        self._released.wait(_HOLD_S)


@dataclass
class Exchange:
    """A request that came to the proxy. `status` is that of the hub's answer, None without one."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float
    status: int | None = None


class HttpProxy:
    """A proxy on a free port of loopback, in plain HTTP. `close` stops it.

    Args:
        upstream: The address of the hub, such as `https://hub:3200`.
        context: The TLS context for an `https` address.
    """

    def __init__(self, upstream: str, context: ssl.SSLContext | None = None) -> None:
        self._upstream = urlsplit(upstream)
        self._context = context
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._exchanges: list[Exchange] = []
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer((_LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="http-proxy", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"http://{_LOOPBACK}:{self._server.server_address[1]}"

    def plant(self, fault: Fault) -> Fault:
        """Let the next matching requests meet `fault`, which is returned. Earlier faults come first."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Remove all faults, and let held requests go on."""
        with self._lock:
            for fault in self._faults:
                fault.times = 0
                fault.release()
            self._faults.clear()

    def exchanges(self, method: str, path: str) -> list[Exchange]:
        """Return the recorded requests with this method whose whole path matches the expression `path`."""
        with self._lock:
            return [one for one in self._exchanges if one.method == method and re.fullmatch(path, one.path)]

    def close(self) -> None:
        """Stop the proxy. Held requests go on and are reset."""
        self.heal()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def noted(self, exchange: Exchange) -> Fault | None:
        """Record a request. Return the fault that it meets, or None."""
        with self._lock:
            self._exchanges.append(exchange)
            for fault in self._faults:
                if fault.meets(exchange):
                    fault.times -= 1
                    return fault
        return None

    def forwarded(self, exchange: Exchange, target: str) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send a request to the hub. Return the status, headers and body of its answer. Raises OSError."""
        host, port = self._upstream.hostname or "", self._upstream.port
        if self._upstream.scheme == "https":
            onward: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=_UPSTREAM_S, context=self._context
            )
        else:
            onward = http.client.HTTPConnection(host, port, timeout=_UPSTREAM_S)
        headers = {name: value for name, value in exchange.headers.items() if name not in _PER_HOP}
        try:
            onward.request(exchange.method, self._upstream.path + target, exchange.body or None, headers)
            answer = onward.getresponse()
            body = answer.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            onward.close()
        exchange.status = answer.status
        return answer.status, answer.getheaders(), body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: HttpProxy
    # Without this, an answer waits 40 ms for the acknowledgement of its headers.
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        with suppress(OSError, ValueError):
            super().handle_one_request()
            return
        self.close_connection = True

    def _handle(self) -> None:
        body = self._body()
        headers = {name.lower(): value for name, value in self.headers.items()}
        path = self.path.partition("?")[0]
        exchange = Exchange(self.command, path, headers, body, time.monotonic())
        fault = self.owner.noted(exchange)
        if fault is None:
            self._answer(*self.owner.forwarded(exchange, self.path))
            return
        if fault.forward:
            self.owner.forwarded(exchange, self.path)
        fault.hit.set()
        if fault.hold:
            fault.wait_released()
        if fault.answer is None:
            self._reset()
            return
        status, more, content = fault.answer
        given = [*more.items(), ("Content-Type", "application/json")]
        self._answer(status, given, json.dumps(content).encode())

    do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815  the names that http.server asks for

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        found = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return found

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _PER_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        # A linger of no time resets the connection instead of ending it in order.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""
