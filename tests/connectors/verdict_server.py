"""A small HTTP server that speaks the gateway's verdict stream and overlay list, with the real fold behind it.

A thread reads the topic and settles each record; every verdict on a job event goes to all who follow.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from connectors.log.kafka_libraries import to_record
from connectors.programs.local_stack import free_port
from schemas.keys.sealing import ensure_keyring
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import Settings
from tests.broker_processes import LOOPBACK, wait_until
from tests.connectors.folded_log import FoldedLog

TOKEN = "operator-token-of-the-tests"


class VerdictServer:
    """Serves until `close`. `mute` holds verdicts back (pings go on), `hang` holds everything back."""

    def __init__(self, settings: Settings, port: int | None = None, brokers: Sequence[str] = ()) -> None:
        self.brokers = [*brokers]
        self.mute = threading.Event()
        self.hang = threading.Event()
        self.followers = 0
        self.log = FoldedLog(ensure_keyring(settings))
        self._lines: list[bytes] = []
        self._settings = settings
        self._closed = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, *_: Any) -> None:
                """Nothing on stderr."""

        # A test may close it and open another on the port, while a bridge tries to connect.
        self.port = port or free_port()
        self._http = ThreadingHTTPServer((LOOPBACK, self.port), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        changed = settings.gateway.model_copy(update={"port": self.port})
        self.settings = settings.model_copy(update={"gateway": changed})
        file = self.settings.operator_token_file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TOKEN)
        file.chmod(0o600)
        for work in (self._http.serve_forever, self._follow_the_log):
            threading.Thread(target=work, daemon=True).start()

    def wait_follower(self) -> None:
        """Wait until somebody follows the verdicts."""
        wait_until(lambda: self.followers, what="a follower of the verdicts")

    def close(self) -> None:
        """Stop; connections end."""
        if not self._closed.is_set():
            self._closed.set()
            self._http.shutdown()
            self._http.server_close()

    def _follow_the_log(self) -> None:
        with topic_reader(self._settings.kafka) as consumer:
            while not self._closed.is_set():
                settled = []
                for batch in consumer.poll(timeout_ms=50).values():
                    for consumed in batch:
                        found = self.log.add(to_record(consumed))
                        if ("ce_type", b"job.event") in consumed.headers:
                            position = [consumed.partition, consumed.offset]
                            settled.append([*position, found.verdict, found.reason])
                if settled:
                    self._lines.append(json.dumps({"settled": settled}).encode() + b"\n")

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            request.send_error(401)
            return
        if request.path == "/api/hub/brokers":
            body = json.dumps({"brokers": self.brokers}).encode()
            request.send_response(200)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
            return
        # Before the follower can know that it follows: what is settled from then on is for it.
        sent = len(self._lines)
        request.send_response(200)
        request.send_header("Content-Type", "application/x-ndjson")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        self.followers += 1
        with suppress(OSError):
            self._stream(request.wfile, sent)
        self.followers -= 1
        request.close_connection = True

    def _stream(self, out: Any, sent: int) -> None:
        pinged = 0.0
        while not self._closed.wait(0.005):
            if self.hang.is_set():
                continue
            waiting = [] if self.mute.is_set() else self._lines[sent:]
            sent += len(waiting)
            if time.monotonic() - pinged > 0.5:
                pinged = time.monotonic()
                waiting = [*waiting, b"{}\n"]
            for line in waiting:
                out.write(b"%x\r\n%b\r\n" % (len(line), line))
            out.flush()
