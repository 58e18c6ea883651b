"""A token server (RFC 6749, 4.4) with one client, whose tokens Kafka checks by the server's published key."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote_plus

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.broker_processes import LOOPBACK

ISSUER, AUDIENCE, SCOPE = "https://tokens.test", "kafka", "log"


class TokenServer(ThreadingHTTPServer):
    """The server. `token_url` gives tokens, `keys_url` the public key."""

    daemon_threads = True

    def __init__(self, client: str, secret: str, lasts_s: int | None) -> None:
        super().__init__((LOOPBACK, 0), _Answers)
        self.client, self.secret, self.lasts_s = client, secret, lasts_s
        self.key = rsa.generate_private_key(65537, 2048)
        self.given = 0
        url = f"http://{LOOPBACK}:{self.server_port}"
        self.token_url, self.keys_url = f"{url}/token", f"{url}/keys"

    def token(self) -> str:
        """A new token of the client."""
        self.given += 1
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": self.client,
            "iat": now,
            "exp": now + (self.lasts_s or 300),
        }
        return jwt.encode({**claims, "scope": SCOPE}, self.key, "RS256", {"kid": "the-key"})


class _Answers(BaseHTTPRequestHandler):
    server: TokenServer

    def do_POST(self) -> None:
        """Give a token to who proves to be the client."""
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        given = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        client, _, secret = map(unquote_plus, given.partition(":"))
        if (client, secret) != (self.server.client, self.server.secret):
            self._answer(401, {"error": "invalid_client"})
        elif asked.get("grant_type") != ["client_credentials"] or asked.get("scope") != [SCOPE]:
            self._answer(400, {"error": "invalid_request"})
        else:
            lasts = {} if self.server.lasts_s is None else {"expires_in": self.server.lasts_s}
            self._answer(200, {"token_type": "Bearer", "access_token": self.server.token(), **lasts})

    def do_GET(self) -> None:
        """Give the public key (RFC 7517)."""
        public = jwt.algorithms.RSAAlgorithm.to_jwk(self.server.key.public_key(), as_dict=True)
        self._answer(200, {"keys": [{**public, "kid": "the-key", "use": "sig", "alg": "RS256"}]})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def token_server(client: str, secret: str, lasts_s: int | None = 300) -> Iterator[TokenServer]:
    """Run a token server whose tokens last so many seconds. None: 300, and it does not say so."""
    with TokenServer(client, secret, lasts_s) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
