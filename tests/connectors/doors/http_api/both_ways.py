"""Requests that are sent by both ways: as they are, or with a header for the careful path (ST-90)."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from tests.connectors.doors.http_api.hub_stack import HubStack

CAREFUL = b"TE: trailers"
UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
TIME = re.compile(rb"20\d\d-\d\d-\d\dT[0-9:.]+Z")
DATE = re.compile(rb"date: [^\r]*\r\n")
TASK = re.compile(rb"task-[0-9a-z-]+")


class Sender:
    """One principal, which speaks to the gateway in one of the two ways over one connection.

    Attributes:
        words: The values of the words with `$` in its requests, such as the id of a message.
    """

    def __init__(self, hub: HubStack, name: str, token: str, side: str, *, is_careful: bool) -> None:
        self.name, self.token, self.side = name, token, side
        # Of the last messages that were leased.
        self.lease, self.message = "no-lease", "no-message"
        self.words: dict[str, str] = {}
        self._is_careful = is_careful
        self._port = hub.gateways[0].settings.gateway.port
        self._open: socket.socket | None = None

    def ask(
        self, line: bytes, headers: Iterable[bytes], body: bytes = b"", is_careful: bool | None = None
    ) -> bytes:
        """Return the whole answer, without what differs between two requests anyway."""
        own = {"NAME": self.name, "SIDE": self.side, "LEASE": self.lease, "MESSAGE": self.message}
        for name, value in (own | self.words).items():
            line, body = (one.replace(f"${name}".encode(), value.encode()) for one in (line, body))
        more = [CAREFUL] if (self._is_careful if is_careful is None else is_careful) else []
        head = b"\r\n".join([line, b"Host: localhost", *headers, *more])
        return self.send(head.replace(b"$LENGTH", b"%d" % len(body)) + b"\r\n\r\n" + body)

    def send(self, request: bytes) -> bytes:
        """Send a request, and return its answer."""
        request = request.replace(b"$TOKEN", self.token.encode())
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
        return self.without_names(found.replace(self.token.encode(), b"$TOKEN"))

    def without_names(self, text: bytes) -> bytes:
        """Return a text without the names of this side."""
        names = {"NAME": self.name, "SIDE": self.side, **self.words}
        for name, value in names.items():
            text = text.replace(value.encode(), f"${name}".encode())
        return text

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        if self._open is not None:
            self._open.close()
            self._open = None


SIDES = ("side0", "side1")
_senders: list[Sender] = []


def two_principals(hub: HubStack, role: str) -> list[tuple[str, str]]:
    """Return names and tokens of two new principals, whose names have the same length."""
    known = [hub.principal(role) for _ in SIDES]
    return known if len(known[0][0]) == len(known[1][0]) else [known[1], hub.principal(role)]


def pair(hub: HubStack, role: str) -> list[Sender]:
    """Return a new sender for each way."""
    return paired(hub, two_principals(hub, role))


def paired(hub: HubStack, known: list[tuple[str, str]]) -> list[Sender]:
    """Return a sender for each way, from names and tokens."""
    found = [
        Sender(hub, *one, side, is_careful=side == SIDES[1]) for one, side in zip(known, SIDES, strict=True)
    ]
    _senders.extend(found)
    return found


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
    "expires_in_s": (None, 7200, 1800, 0, "x"),
    "blob": (None, "0" * 64, "x"),
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


def changed(
    draw: random.Random,
    method: bytes,
    path: bytes,
    said: dict[str, Any],
    values: Mapping[str, tuple[Any, ...]],
    queries: tuple[bytes, ...],
) -> tuple[bytes, list[bytes], bytes]:
    """Return a usual request with up to three changes, most often with one."""
    headers, query = list(USUAL), b""
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        what = draw.randrange(4)
        if what == 0:
            headers.append(draw.choice(HEADERS))
        elif what == 1:
            query = draw.choice(queries)
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
    return b"%b %b%b HTTP/1.1" % (method, path, query), headers, body


def records_of(hub: HubStack, sender: Sender) -> tuple[list[str], list[Any]]:
    """Return the records of one side by their streams, and the first refusals by route and reason."""
    found, refused, ids = [], dict[Any, list[str]](), dict[str, str]()
    for one in hub.log():
        if one.stream == "refused/http" and one.body["principal"] == sender.name:
            about = refused.setdefault((one.body["route"], one.body["reason"]), [])
            about.append(one.body["why"])
        is_own = sender.side in one.stream or one.source.endswith(f"/{sender.name}")
        # Not the copies of publications, which follow in any order.
        if is_own and one.source.startswith("http/") and not one.stream.startswith("refused/"):
            body = TIME.sub(b"TIME", json.dumps(one.body, sort_keys=True).encode())
            text = b" ".join((one.stream.encode(), one.type.encode(), one.source.encode(), body))
            found.append(TASK.sub(b"TASK", sender.without_names(text)).decode())
    # Partitions are read in any order.
    found.sort(key=lambda text: text.partition(" ")[0])
    # Equal ids stay equal.
    same = [
        re.sub(UUID.pattern.decode(), lambda id_: ids.setdefault(id_[0], f"ID{len(ids)}"), one) for one in found
    ]
    return same, sorted((key, why[:5]) for key, why in refused.items())


def close_all() -> None:
    """Close the connections of all senders."""
    while _senders:
        _senders.pop().close()
