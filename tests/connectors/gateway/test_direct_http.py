"""The engine and the careful path answer each request with the same bytes, and leave the same records (ST-90).

A request is sent twice: as it is, and with a header that lets the careful path serve it.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.connectors.gateway.hub_stack import MESSAGES, HubStack

CAREFUL = b"TE: trailers"
UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
TIME = re.compile(rb"20\d\d-\d\d-\d\dT[0-9:.]+Z")
DATE = re.compile(rb"date: [^\r]*\r\n")

pytestmark = pytest.mark.requirement("ST-90")


class Sender:
    """One principal, which speaks to the gateway in one of the two ways over one connection."""

    def __init__(self, hub: HubStack, role: str, *, is_careful: bool) -> None:
        self.name, self.token = hub.principal(role)
        # Of the last messages that were leased.
        self.lease, self.message = "no-lease", "no-message"
        self._more = [CAREFUL] if is_careful else []
        self._port = hub.gateways[0].settings.gateway.port
        self._open: socket.socket | None = None

    def ask(self, line: bytes, headers: Iterable[bytes], body: bytes = b"") -> bytes:
        """Return the whole answer, without what differs between two requests anyway."""
        for name, value in (("NAME", self.name), ("LEASE", self.lease), ("MESSAGE", self.message)):
            body = body.replace(f"${name}".encode(), value.encode())
        head = b"\r\n".join([line, b"Host: localhost", *headers, *self._more])
        return self.send(head.replace(b"$LENGTH", b"%d" % len(body)) + b"\r\n\r\n" + body)

    def send(self, request: bytes) -> bytes:
        """Send a request, and return its answer."""
        request = request.replace(b"$TOKEN", self.token.encode()).replace(b"$NAME", self.name.encode())
        if self._open is None:
            self._open = socket.create_connection(("127.0.0.1", self._port), 10)
        self._open.sendall(request)
        found = b""
        while True:
            part = self._open.recv(65536)
            found = (found + part).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            end = found.find(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", found[:end]) if end >= 0 else None
            if not part or (length and len(found) >= end + 4 + int(length[1])):
                break
        if not part or b"connection: close" in found[:end]:
            self.close()
        if (lease := re.search(rb'"lease_id":"([^"]+)"', found)) is not None:
            self.lease = lease[1].decode()
            self.message = re.findall(rb'"id":"([^"]+)"', found)[0].decode()
        found = DATE.sub(b"", UUID.sub(b"ID", TIME.sub(b"TIME", found)))
        return found.replace(self.name.encode(), b"$NAME").replace(self.token.encode(), b"$TOKEN")

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        if self._open is not None:
            self._open.close()
            self._open = None


@pytest.fixture(scope="module")
def sides(hub: HubStack) -> Iterator[list[Sender]]:
    """A principal for each way."""
    found = [Sender(hub, "worker", is_careful=is_careful) for is_careful in (False, True)]
    yield found
    for one in found:
        one.close()


def direct(hub: HubStack) -> dict[str, float]:
    """How many requests the engine of the first gateway has begun, by how they ended."""
    text = hub.operator.get("/metrics").text
    return {
        name: float(value)
        for name, value in re.findall(r'trunkline_direct_requests_total\{result="(\w+)"\} ([0-9.]+)', text)
    }


USUAL = (b"Authorization: Bearer $TOKEN", b"Content-Type: application/json", b"User-Agent: a test/1 (b; c)")
VALUES: dict[str, tuple[Any, ...]] = {
    "recipient": ("$NAME", "hub", "nobody-of-this-name", "", "a b", 7, None, "x" * 129),
    "type": ("note", "", " ", "a\nb", "a\u0000b", "x" * 129, 3, None, "ö☃"),
    "payload": ({"text": "hello"}, {}, [], "text", 1.5, None, {"a": {"b": [1, None, True]}}, 2**70, "☃"),
    "priority": ("low", "normal", "high", "urgent", None),
    "in_reply_to": ("m1", None, "", "a/b"),
    "thread": ("t1", None, 5),
    "deliver_after_s": (None, 3600, 0, -1, "1", True, 1e9),
    "expires_in_s": (None, 7200, 60, 0, "x"),
    "blob": (None, "0" * 64, "x"),
    "no_such_field": (1,),
}
# Of the operations on leased messages.
LEASE_VALUES: dict[str, tuple[Any, ...]] = {
    "lease_id": ("no-lease", "", None, 5),
    "message_ids": (["$MESSAGE", "$MESSAGE"], ["nobody", "$MESSAGE"], [], ["a b"], None, ["x"] * 1001),
    "reason": ("broken", "x" * 501, "a\u0000b", None),
    "lease": (1, 300, 300.0, 0, 1.5, 10**9, True, "5", None),
    "no_such_field": (1,),
}
HEADERS = (
    b"Idempotency-Key: key-1",
    b"Idempotency-Key: key-2",
    b"Idempotency-Key: a b",
    b"Idempotency-Key: " + b"k" * 256,
    b"X-Request-ID: request-1",
    b"Content-Type: text/plain",
    b"Content-Type: application/json; charset=utf-8",
    b"Content-Type: application/json; charset=latin-1",
    b"Content-Encoding: gzip",
    b"Authorization: Bearer wrong",
    b"Authorization: Basic $TOKEN",
    b"Connection: keep-alive",
    b"Connection: close",
    b"Accept:",
    b"Expect: 100-continue",
    b"Range: bytes=0-1",
    b"Content-Length: 3",
    b"Host: localhost",
)
QUERIES = (b"", b"", b"?limit=1", b"?limit=0", b"?limit=x", b"?limit=1&limit=2", b"?lease=300", b"?lease=0.5")
QUERIES += (b"?", b"?limit=1#f", b"?a b", b"?limit=\xff", b"?limit=%31", b"?limit=+1")
QUERIES += (b"?limit=2&lease=60", b"?wait=0", b"?wait=0.01", b"?nothing=1", b"?wait_reply=0.01", b"?%6cimit=3")


def requests(draw: random.Random, count: int) -> Iterator[tuple[bytes, list[bytes], bytes]]:
    """Usual requests with up to three changes, most of them with one."""
    for _ in range(count):
        path, said, values = b"", dict[str, Any](recipient="$NAME", type="note"), VALUES
        headers, query = list(USUAL), b""
        method = draw.choice((b"POST", b"POST", b"GET"))
        if method == b"POST" and draw.random() < 0.4:
            path, values = draw.choice((b"/ack", b"/nack", b"/extend")), LEASE_VALUES
            said = {"lease_id": "$LEASE", "message_ids": ["$MESSAGE"]}
            said |= {"lease": 60} if path == b"/extend" else {}
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            what = draw.randrange(4)
            if what == 0:
                headers.append(draw.choice(HEADERS))
            elif what == 1:
                query = draw.choice(QUERIES)
            else:
                name = draw.choice(list(values))
                said[name] = draw.choice(values[name])
        if draw.random() < 0.05:
            headers.remove(draw.choice(USUAL))
        body = json.dumps(said, ensure_ascii=draw.random() < 0.5).encode()
        if draw.random() < 0.1:
            body = draw.choice(
                (b"", b"[]", b"null", b"{", body[:-1], body + b" ", b'{"type":"a","type":"b"}', b"\xff")
            )
        if method == b"GET" and draw.random() < 0.95:
            body = b""
        if not any(one.startswith(b"Content-Length") for one in headers) and (body or method == b"POST"):
            headers.append(b"Content-Length: $LENGTH")
        draw.shuffle(headers)
        yield b"%b %b%b%b HTTP/1.1" % (method, MESSAGES.encode(), path, query), headers, body


@pytest.mark.parametrize("seed", range(3))
def test_both_ways_give_the_same_answer_and_the_same_mailbox(
    hub: HubStack, sides: list[Sender], seed: int
) -> None:
    before = direct(hub)
    for line, headers, body in requests(random.Random(seed), 300):
        # A length that does not fit would let the client wait.
        if b"Content-Length: 3" in headers and len(body) < 3:
            continue
        answers = [side.ask(line, headers, body) for side in sides]
        assert answers[0] == answers[1], (line, headers, body)
    after = direct(hub)
    assert after["answered"] - before.get("answered", 0) > 30


def test_usual_requests_are_answered_by_the_engine(hub: HubStack, sides: list[Sender]) -> None:
    before, side = direct(hub), sides[0]
    body, head = b'{"recipient": "$NAME", "type": "note"}', (*USUAL, b"Content-Length: $LENGTH")
    assert side.ask(b"POST /api/hub/messages HTTP/1.1", head, body).startswith(b"HTTP/1.1 200")
    assert side.ask(b"GET /api/hub/messages?limit=1000 HTTP/1.1", USUAL).startswith(b"HTTP/1.1 200")
    assert direct(hub)["answered"] == before.get("answered", 0) + 2
