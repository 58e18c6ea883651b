"""Connections whose requests are served in one of the two ways, and parts of unusual requests."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.broker_processes import LOOPBACK
from tests.matrix.asking import WAYS
from tests.matrix.ground import Ground

VARIES = (
    (rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", b"ID"),
    (rb"20\d\d-\d\d-\d\dT[0-9:.]+Z", b"TIME"),
    (rb"\b1[0-9]{12}\b", b"MILLISECONDS"),
    (rb"\b[0-9a-f]{8,64}\b", b"HEX"),
    (rb"(?i)(date|content-length): [^\r]*\r\n", b""),
    (rb'("\w*(?:token|secret|password|public_key)\w*": ?)"[^"]*"', rb"\1SECRET"),
    (rb'"position":\[\d+,\d+\]', b"POSITION"),
    # Pydantic shows the begin and the end of a long value.
    (rb"input_value=.*?, input_type", b"input_value"),
    # The number of a thing's name.
    (rb"([a-z])-\d+\b", rb"\1-N"),
)
# No time comes to its end within the tests, because the two ways would see it at different requests.
ODD: tuple[Any, ...] = ("", " ", "☃\u2028\U0001f600", "a\nb", "\x00\x01", "\ud800", "y" * 3000, "a/b", "hub")
ODD += (
    "x" * 129,
    3607,
    3600.5,
    3600.0,
    2**70,
    True,
    None,
    [],
    ["nobody", "nobody"],
    {},
    {"a": {"b": [1, None]}},
)
BODIES = (b"", b"[]", b"null", b"{", b'{"type":"a","type":"b"}', b'{"id":1,"id":2}', b"\xff", b"{} ", b" {}")


def normal(text: bytes) -> bytes:
    """Return a text without what differs between two requests anyway."""
    for pattern, by in VARIES:
        text = re.sub(pattern, by, text)
    return text


class Side:
    """A connection to a door, whose requests are served in one of the two ways."""

    def __init__(self, ground: Ground, door: int, is_careful: bool) -> None:
        self._gateway, self._port = ground.gateway, ground.gateway.ports[door]
        self._more = [b"TE: trailers"] if is_careful else []
        self._open: socket.socket | None = None
        self._count = 0

    def ask(self, lines: Iterable[bytes], body: bytes) -> list[Any]:
        """Return the answer to a request, and the records and refusals that it has left."""
        log, refused = self._gateway.log.records, self._gateway.refused
        logged, said = len(log), len(refused)
        answer = self._sent(b"\r\n".join([*lines, *self._more, b"", b""]) + body)
        assert not answer.startswith(b"HTTP/1.1 5"), answer
        made = [
            f"{one.stream} {one.type} {one.door} {one.principal} ".encode() + one.value
            for one, _ in log[logged:]
        ]
        about = [" ".join(map(str, one)).encode() for one in refused[said:]]
        return [normal(answer), [normal(one) for one in made], [normal(one) for one in about]]

    def _sent(self, request: bytes) -> bytes:
        if self._open is None:
            self._open = socket.create_connection((LOOPBACK, self._port), 20)
        # Many clients send head and body in two writes.
        self._count += 1
        head = request.find(b"\r\n\r\n") + 4 if self._count % 2 else len(request)
        for part in filter(None, (request[:head], request[head:])):
            self._open.sendall(part)
        found = b""
        while part := self._open.recv(65536):
            found = (found + part).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            end = found.find(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", found[:end]) if end >= 0 else None
            if length and len(found) >= end + 4 + int(length[1]):
                break
        if not part or b"connection: close" in found[:end]:
            self.close()
        return found

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        if self._open is not None:
            self._open.close()
            self._open = None


@contextmanager
def both_sides(ground: Ground, door: int) -> Iterator[list[Side]]:
    """Give a connection for each way."""
    found = [Side(ground, door, way) for way in WAYS]
    try:
        yield found
    finally:
        for one in found:
            one.close()


def with_length(lines: list[bytes], body: bytes, is_needed: bool) -> list[bytes]:
    """Return the head of a request with the length of its body, if it has none yet."""
    if any(one.startswith(b"Content-Length") for one in lines) or not (body or is_needed):
        return lines
    return [*lines, b"Content-Length: %d" % len(body)]


def encoded(document: Any, *, as_ascii: bool) -> bytes:
    """Return JSON, also of texts that UTF-8 has no bytes for."""
    return json.dumps(document, ensure_ascii=as_ascii).encode("utf-8", "surrogatepass")
