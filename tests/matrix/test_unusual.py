"""Requests in unusual forms: both ways have the same answer, byte for byte, and leave the same records.

Two callers send each request about things of their own, one of them with a header for the careful path.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from typing import Any

import pytest

from connectors.doors.mcp_tools.agents.operation_tools import ARGUMENTS
from connectors.hub.engine.engine import Engine
from connectors.hub.engine.operation import Operation
from tests.agent_signatures import signed_headers
from tests.connectors.doors.mcp_tools.signed_calls import ACCEPT, call_document
from tests.matrix.asking import WAYS, operation
from tests.matrix.bounds import wrong_values
from tests.matrix.ground import Caller, Ground
from tests.matrix.samples import SAMPLES
from tests.matrix.sides import BODIES, ODD, both_sides, encoded, with_length
from tests.matrix.tool_samples import Agents, call_of

HEADERS = (
    b"Idempotency-Key: key-one",
    b"Idempotency-Key: key-two",
    b"Idempotency-Key: a b",
    b"Idempotency-Key: " + b"k" * 256,
    b"X-Request-ID: request-one",
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
QUERIES = (
    b"?",
    b"?limit=1",
    b"?limit=0",
    b"?limit=x",
    b"?limit=1&limit=2",
    b"?limit=1#f",
    b"?a b",
    b"?after=%20",
)
QUERIES += (
    b"?limit=\xff",
    b"?limit=%31",
    b"?limit=+1",
    b"?%6cimit=3",
    b"?nothing=1",
    b"?after=a",
    b"?lease=300",
)
QUERIES += (b"?lease=0.5", b"?limit=2&lease=600", b"?wait=0", b"?wait=0.01", b"?wait_reply=0.01")
NAMES = (
    b"",
    b".",
    b"..",
    b"-a",
    b"a~b",
    b"a/",
    b"a/b",
    b"a%2Eb",
    b"a%2eb",
    b"a%20b",
    b"a;b",
    b"a%",
    b"a%2Fb",
    b"\xff",
)
# Of names that a thing may get, each side has its own.
NAMES += (b"x" * 100 + b"$", b"x" * 101 + b"$", b"nobody$", b"a.%61$")
PLAIN = (b"Host: localhost", b"Authorization: Bearer $TOKEN", b"Content-Type: application/json")


_numbers = itertools.count(1)
OF_MAILBOXES = (
    "drain_messages",
    "acknowledge_messages",
    "give_back_messages",
    "extend_lease",
    "replay_message",
)


class Change:
    """Up to three changes of a request for an operation, the same for both sides."""

    def __init__(self, draw: random.Random, ground: Ground, name: str) -> None:
        asked = operation(ground, name)
        self.headers, self.query, self.fields = list(PLAIN), b"", dict[str, Any]()
        self.body: bytes | None = None
        self.path, self.as_ascii = dict[str, bytes](), draw.random() < 0.5
        schema: dict[str, Any] = {} if asked.BODY is None else asked.BODY.model_json_schema()
        fields = schema.get("properties", {})
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            match draw.randrange(8):
                case 0 | 1:
                    self.headers.append(draw.choice(HEADERS))
                case 2:
                    self.query = draw.choice(QUERIES)
                case 3 if asked.parameters:
                    self.path[draw.choice(list(asked.parameters))] = draw.choice(NAMES)
                case 4 if draw.random() < 0.3:
                    self.body = draw.choice(BODIES)
                case 5 if draw.random() < 0.2:
                    self.headers.remove(draw.choice([one for one in PLAIN if one in self.headers]))
                case _ if fields and draw.random() < 0.9:
                    field = draw.choice(list(fields))
                    wrong = list(wrong_values(fields[field], schema.get("$defs", {})))
                    self.fields[field] = draw.choice(wrong if wrong and draw.random() < 0.5 else ODD)
                case _ if fields:
                    self.fields["no_such_field"] = 1
        draw.shuffle(self.headers)

    def request(self, ground: Ground, name: str, caller: Caller) -> tuple[list[bytes], bytes] | None:
        """Return the request of a caller. None: its length does not fit, so that the gateway would wait."""
        asked, sample = operation(ground, name), SAMPLES[name].request(ground, caller)
        path = asked.PATH.encode()
        for word in asked.parameters:
            name_in_path = self.path.get(word, sample.path[word].encode()).replace(
                b"$", b"-%027d" % next(_numbers)
            )
            path = path.replace(b"{%b}" % word.encode(), name_in_path)
        line = b"%b %b%b HTTP/1.1" % (asked.METHOD.encode(), path, self.query or sample.query.encode())
        body = b"" if sample.body is None else encoded(sample.body | self.fields, as_ascii=self.as_ascii)
        body = body if self.body is None else self.body
        headers = [one.replace(b"$TOKEN", caller.token.encode()) for one in self.headers]
        if b"Content-Length: 3" in headers and len(body) < 3:
            return None
        return with_length([line, *headers], body, asked.METHOD == "POST"), body


@pytest.mark.long
@pytest.mark.requirement("ST-90")
@pytest.mark.parametrize("seed", range(3))
def test_an_operation_is_served_alike_by_both_ways(ground: Ground, seed: int) -> None:
    draw = random.Random(seed)
    callers = {letter: [ground.principal(letter) for _ in WAYS] for letter in "odwv"}
    names = [name for name, sample in SAMPLES.items() if sample.is_alone]
    del ground.gateway.begun[:]
    with both_sides(ground, 0) as sides:
        for _ in range(300):
            name = draw.choice(names)
            # All agents share one mailbox.
            letter = draw.choice("ooodwv" if name in OF_MAILBOXES else "ooodwva")
            change = Change(draw, ground, name)
            asking = callers.get(letter) or [ground.caller(letter) for _ in WAYS]
            requests = [change.request(ground, name, one) for one in asking]
            if operation(ground, name).METHOD == "GET" and name != "drain_messages":
                # Lists show what is the caller's own, so one caller asks both times.
                requests[1] = requests[0]
            found = [side.ask(*one) for side, one in zip(sides, requests, strict=True) if one]
            assert found[:1] == found[1:], requests[0]
    assert ground.gateway.begun.count("answered") > 80


DOCUMENTS: tuple[dict[str, Any], ...] = (
    {"id": "seven"},
    {"id": 2**70},
    {"id": 1.5},
    {"id": None},
    {"id": "☃"},
    {"jsonrpc": "1.0"},
    {"method": "tools/list", "params": {}},
    {"method": "ping", "params": {}},
    {"method": "no/such"},
    {"params": {"name": "send_to_agent", "arguments": {}, "_meta": {}}},
    {"params": {"name": "send_to_agent"}},
    {"params": {"name": "get_my_messages"}},
    {"params": {"name": "get_my_messages", "arguments": None}},
    {"params": {"name": "no_such_tool", "arguments": {}}},
    {"params": {"name": 5, "arguments": {"name": "mark_read"}}},
    {"params": {"arguments": {}}},
    {"params": []},
    {"extra": 1},
)
MCP_HEADERS = (
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/json; charset=utf-8"),
    ("Content-Encoding", "gzip"),
    ("Accept", "text/plain"),
    ("Accept", "application/json"),
    ("Accept", "text/event-stream"),
    ("Accept", "*/*"),
    ("Origin", "http://localhost:3100"),
    ("Host", "evil.example:3100"),
    ("Host", "LOCALHOST.:3100"),
    ("Host", "trunk.test"),
    ("Host", "[::1]:3100"),
    ("Mcp-Protocol-Version", "2025-06-18"),
    ("Mcp-Protocol-Version", "1999-01-01"),
    ("Mcp-Session-Id", "s1"),
    ("Connection", "close"),
    ("Expect", "100-continue"),
    ("X-Empty", ""),
)
LINES = ("POST /mcp? HTTP/1.1", "POST /mcp/ HTTP/1.1", "POST /sse HTTP/1.1", "PUT /mcp HTTP/1.1")
SPOILS = ("wrong", "old", "missing", "twice", "unknown")
KINDS: dict[str, tuple[Any, ...]] = {
    "header": MCP_HEADERS,
    "document": DOCUMENTS,
    "line": LINES,
    "body": BODIES,
    "spoil": SPOILS,
}


def changes(draw: random.Random, tool: str) -> dict[str, Any]:
    """Return up to three changes of a call."""
    found, schema = dict[str, Any](arguments={}), ARGUMENTS[tool].model_json_schema()
    for _ in range(draw.choice((0, 0, 1, 1, 1, 2, 3))):
        kind = draw.choice((*KINDS, *["argument"] * 4))
        if kind != "argument":
            found[kind] = draw.choice(KINDS[kind])
        elif fields := schema.get("properties"):
            name = draw.choice([*fields, "noSuchField"])
            wrong = list(wrong_values(fields.get(name, {}), schema.get("$defs", {})))
            found["arguments"][name] = draw.choice(wrong if wrong and draw.random() < 0.5 else ODD)
    return found


def call(
    agents: Agents, tool: str, changed: dict[str, Any], number: int, as_ascii: bool
) -> tuple[list[bytes], bytes]:
    """Return a signed call with these changes, about new things of an agent."""
    arguments = {**call_of(agents, tool), **changed["arguments"]}
    document = {**call_document(tool, **arguments), "id": number, **changed.get("document", {})}
    body = changed.get("body", encoded(document, as_ascii=as_ascii))
    name, spoil = agents.ann, changed.get("spoil")
    at = str(int(time.time()) - 1000 * (spoil == "old"))
    signed = list(signed_headers(name, agents.key_of(name), body + b" " * (spoil == "wrong"), at).items())
    if spoil in ("missing", "twice"):
        signed = signed[:-1] if spoil == "missing" else [*signed, signed[-1]]
    elif spoil == "unknown":
        signed = [(one, "nobody" if value == name else value) for one, value in signed]
    usual = {"Host": "localhost:3100", **ACCEPT, **dict([changed["header"]] if "header" in changed else [])}
    line = changed.get("line", LINES[0].replace("?", ""))
    lines = [line, *(f"{one}: {value}" for one, value in (*usual.items(), *signed))]
    return with_length([one.encode() for one in lines], body, line.startswith("POST")), body


@pytest.mark.long
@pytest.mark.requirement("ST-95")
@pytest.mark.requirement("ST-96")
def test_a_call_of_a_tool_is_served_alike_by_both_ways(ground: Ground) -> None:
    draw, agents = random.Random(7), [Agents(ground) for _ in WAYS]
    single = [("mark_read", {kind: one, "arguments": {}}) for kind, all_ in KINDS.items() for one in all_]
    drawn = ((tool, changes(draw, tool)) for tool in draw.choices(list(ARGUMENTS), k=300))
    del ground.gateway.begun[:]
    with both_sides(ground, 1) as sides:
        for number, (tool, changed) in enumerate([*single, *drawn]):
            as_ascii, is_again = draw.random() < 0.5, draw.random() < 0.1
            requests = [call(one, tool, changed, number, as_ascii) for one in agents]
            for _ in range(1 + is_again):
                found = [side.ask(*one) for side, one in zip(sides, requests, strict=True)]
                assert found[0] == found[1], requests[0]
    assert ground.gateway.begun.count("answered") > 50
    assert ground.gateway.begun.count("refused") > 0


@pytest.mark.requirement("ST-90")
def test_the_engine_finds_the_operation_of_each_path_and_no_other(ground: Ground) -> None:
    app = ground.gateway.app
    engine = app.state.engine
    found = {
        one.route: values
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if (one := found_by(engine, method, path, values := re.findall(r"{(\w+)}", path))) is not None
    }
    assert found == {one.route: list(one.parameters) for one in engine._operations.values()}
    assert len(found) > 50
    for path in ("/a%20b", "/a%2Db", "/", "/a/b", "/a;b", "/a/subscribe/", "/a//subscribe", "/ä", "/a#b"):
        assert engine.find(f"POST /api/hub/topics{path} HTTP/1.1".encode())[0] is None


def found_by(engine: Engine, method: str, path: str, names: list[str]) -> Operation | None:
    """Return the operation of a path, whose parameters have their names as values."""
    plain = re.sub(r"[{}]", "", path)
    operation, values, query = engine.find(f"{method.upper()} {plain}?limit=1 HTTP/1.1".encode())
    if operation is None:
        return None
    assert (operation.PATH, [one.decode() for one in values], query) == (path, names, b"limit=1")
    return operation
