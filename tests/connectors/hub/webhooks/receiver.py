"""A real HTTP server that receives webhook calls, and answers as it is told."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """One answer: its status and headers, its body, and how long it takes."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay_s: float = 0.0


@dataclass
class Call:
    """One request as it came: its path, its headers in lower case, its body, and when it came."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float


class Receiver:
    """Answers with `answers` in their order, and then with status 200."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/inbox?from=trunkline"
        self.answers: list[Answer] = []
        self.calls: list[Call] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def ids(self) -> list[str]:
        """The ids of the messages of the calls, in their order."""
        return [json.loads(call.body)["id"] for call in self.calls]


@contextmanager
def receiving(tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> Iterator[Receiver]:
    """Run a receiver on a port of a loopback address, by default a free one, with TLS if a context is given."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            with receiver.lock:
                receiver.calls.append(Call(self.path, headers, body, time.time()))
                answer = receiver.answers.pop(0) if receiver.answers else Answer()
                receiver.at_once += 1
                receiver.most_at_once = max(receiver.most_at_once, receiver.at_once)
            stopped.wait(answer.delay_s)
            with receiver.lock:
                receiver.at_once -= 1
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                self.close_connection = True

    stopped = threading.Event()
    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver = Receiver(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
