"""Calls of agents' tools, sent as they are, or with a header that lets the careful path serve them (ST-95)."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from connectors.plumbing.network.rates import BURST
from tests.agent_signatures import signed_headers
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import ACCEPT, call_document
from tests.raw_records import read_to_end
from trunkline_agent.mcp.signing import load_private_key

CAREFUL = {"TE": "trailers"}
NAME, PEER = "$NAME", "peer"
AGENTS, NAMES = ("agent-d", "agent-c"), re.compile(rb"agent-[cd]")
VARIES = (
    (rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", b"ID"),
    (rb"20\d\d-\d\d-\d\dT[0-9:.]+Z", b"TIME"),
    (rb"\b1[0-9]{12}\b", b"MILLISECONDS"),
    (rb"\b[0-9a-f]{64}\b", b"DIGEST"),
    (rb"(?i)date: [^\r]*\r\n", b""),
)


class Request(NamedTuple):
    """A request before it is signed. `spoil` is what is wrong with its signature, "" for nothing."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    spoil: str = ""


class Side:
    """One agent, which speaks to the gateway in one of the two ways over one connection."""

    def __init__(self, agent: Agent, gateway: McpGateway, more: dict[str, str]) -> None:
        self.name, self._key = agent.name, load_private_key(agent.key_path.read_bytes())
        # Of the last messages that were shown.
        self.lease, self.message = "no-lease", "no-message"
        self._port, self._more = int(gateway.mcp_url.rpartition(":")[2]), more
        self._open: socket.socket | None = None
        self.last, self._count = b"", 0

    def ask(self, request: Request) -> bytes:
        """Sign and send a request. Return the whole answer, without what differs between two agents anyway."""
        body = request.body
        for name, value in ((NAME, self.name), ("$LEASE", self.lease), ("$MESSAGE", self.message)):
            body = body.replace(name.encode(), value.encode())
        at = str(int(time.time()) - 1000 * (request.spoil == "old"))
        signed = signed_headers(self.name, self._key, body + b" " * (request.spoil == "wrong"), at)
        pairs = [*request.headers, *signed.items(), *self._more.items()]
        if request.spoil == "missing":
            pairs.remove(list(signed.items())[-1])
        elif request.spoil == "twice":
            pairs.append(list(signed.items())[-1])
        elif request.spoil == "unknown":
            pairs = [(name, "nobody" if value == self.name else value) for name, value in pairs]
        if request.line.startswith("POST"):
            pairs.append(("Content-Length", str(len(body))))
        head = "".join(f"{name}: {value}\r\n" for name, value in pairs)
        return self.send(f"{request.line}\r\n{head}\r\n".encode() + body)

    def again(self) -> bytes:
        """Send the last request again, with the same signature."""
        return self.send(self.last)

    def send(self, request: bytes) -> bytes:
        """Send a request, and return its answer."""
        self.last = request
        if self._open is None:
            self._open = socket.create_connection(("127.0.0.1", self._port), 20)
        # Many clients send head and body in two writes.
        self._count += 1
        head = request.find(b"\r\n\r\n") + 4 if self._count % 2 else len(request)
        self._open.sendall(request[:head])
        if head < len(request):
            self._open.sendall(request[head:])
        found = b""
        while part := self._open.recv(65536):
            found = (found + part).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            end = found.find(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", found[:end]) if end >= 0 else None
            if length and len(found) >= end + 4 + int(length[1]):
                break
        if not part or b"connection: close" in found[:end]:
            self.close()
        if lease := re.search(rb'"leaseId":"([^"]+)"', found):
            self.lease = lease[1].decode()
        if shown := re.findall(rb'"id":"([^"]{36})"', found):
            self.message = shown[-1].decode()
        return self.normal(found)

    def normal(self, text: bytes) -> bytes:
        """Return a text without what differs between two agents anyway."""
        for pattern, by in VARIES:
            text = re.sub(pattern, by, text)
        return NAMES.sub(NAME.encode(), text)

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        if self._open is not None:
            self._open.close()
            self._open = None


@contextmanager
def both_sides(gateway: McpGateway, folder: Path) -> Iterator[list[Side]]:
    """Give an agent for each way. Their names have one length, and both can write to a third one."""
    with gateway.client() as operator:
        Agent(PEER, folder).joined(operator)
        agents = [Agent(name, folder).joined(operator) for name in AGENTS]
    found = [Side(one, gateway, more) for one, more in zip(agents, ({}, CAREFUL), strict=True)]
    yield found
    for one in found:
        one.close()


def direct(gateway: McpGateway) -> dict[str, float]:
    """How many calls the gateway has begun directly, by how they ended."""
    with gateway.client() as operator:
        text = operator.get("/metrics").text
    found = re.findall(r'trunkline_direct_requests_total\{result="(\w+)"\} ([0-9.]+)', text)
    return {"answered": 0, "refused": 0, "passed_on": 0} | {name: float(value) for name, value in found}


def records(gateway: McpGateway, side: Side) -> list[tuple[bytes, bytes]]:
    """The stream, type and body of the records that an agent has caused, by stream.

    Of the refusals of each reason they are the first ones. The later ones are recorded at a bounded rate.
    Copies of publications are left out, because they follow in any order.
    """
    found: dict[bytes, list[bytes]] = {}
    name = side.name.encode()
    for one in read_to_end(gateway.settings.kafka):
        headers = dict(one.headers)
        if headers["ce_type"] == b"request.refused":
            body = json.loads(one.value)
            if body["principal"] == side.name:
                found.setdefault(b"refused " + body["reason"].encode(), []).append(side.normal(one.value))
        elif name in headers["ce_source"] and not (
            headers["ce_type"] == b"message.posted" and b'"topic":' in (one.value or b"")
        ):
            about = headers["ce_type"] + b" by " + side.normal(headers["ce_source"]) + b" "
            found.setdefault(side.normal(one.key), []).append(about + side.normal(one.value))
    return [
        (stream, body)
        for stream, bodies in sorted(found.items())
        for body in (bodies[: int(BURST)] if stream.startswith(b"refused ") else bodies)
    ]


def usual(tool: str, **arguments: Any) -> Request:
    """A call as clients send it."""
    body = json.dumps(call_document(tool, **arguments)).encode()
    return Request("POST /mcp HTTP/1.1", [("Host", "localhost:3100"), *ACCEPT.items()], body)
