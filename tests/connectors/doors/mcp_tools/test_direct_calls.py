"""Direct calls and the careful path give each request the same bytes, and leave the same records (ST-95).

A request is signed and sent twice: by one agent as it is, and by another one with a header that lets the
careful path serve it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connectors.doors.mcp_tools.agents.tool_arguments import ARGUMENTS as MODELS
from tests.connectors.doors.mcp_tools.call_sides import (
    NAME,
    PEER,
    Request,
    Side,
    both_sides,
    direct,
    records,
    usual,
)
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import call_document

pytestmark = pytest.mark.requirement("ST-95")


@pytest.fixture(scope="module")
def sides(shared_gateway: McpGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Side]]:
    """An agent for each way."""
    with both_sides(shared_gateway, tmp_path_factory.mktemp("sides")) as found:
        yield found


CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("send_to_agent", {"targetAgentId": NAME, "message": "hello"}),
    ("send_to_agent", {"targetAgentId": PEER, "message": "hello ☃"}),
    ("get_my_messages", {"limit": 3}),
    ("mark_read", {"messageIds": ["$MESSAGE", "nobody"]}),
    ("discover_agents", {}),
    ("update_my_status", {"status": "working"}),
    ("lease_messages", {"limit": 2}),
    ("ack_messages", {"leaseId": "$LEASE", "messageIds": ["$MESSAGE"]}),
    ("nack_message", {"leaseId": "$LEASE", "messageId": "$MESSAGE", "reason": "no"}),
    ("extend_lease", {"leaseId": "$LEASE", "messageIds": ["$MESSAGE", "nobody"]}),
)
# No time comes to its end within the tests, because the two ways would see it at different requests.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "targetAgentId": (NAME, PEER, "operator", "nobody-of-this-name", "", "a b", 7, None, "hub"),
    "message": ("x", "", "☃\u2028\U0001f600", "\x00\x01", "\ud800", 5, None, "y" * 3000, "z" * 70_000),
    "priority": ("low", "high", "urgent", None),
    "ttlSeconds": (3600, 0, -1, "1", 1e9, 3600.5),
    "delaySeconds": (3600, 0, None, 7200),
    "expiresInSeconds": (3600, 0, 3600.5),
    "deliverAfterSeconds": (3600, None, 7200),
    "inReplyTo": ("m1", "", "a/b"),
    "thread": ("t1", None, 5),
    "blob": (None, "0" * 64, "x"),
    "idempotencyKey": ("key-1", "key-1", "key-2", "a b", "k" * 256, None, 5),
    "limit": (1, 2, 1000, 0, 1001, 1.0, True, "3"),
    "unreadOnly": (True, False, None, 1),
    "since": (0, 4_000_000_000_000, -1, None, 1.5),
    "messageIds": ([], ["$MESSAGE", "$MESSAGE"], ["nobody"], ["a b"], None, ["x"] * 1001),
    "messageId": ("nobody", "", None),
    "leaseId": ("no-lease", "", 5),
    "leaseSeconds": (3600, 300, 0, 1.5, True),
    "reason": ("broken", "x" * 501, "a\x00b", None),
    "status": ("idle", "working", "stopped", None, 5),
    "capability": ("read", "no-such", "", None),
    "after": ("a", "z", "", None),
    "capabilities": (["read"], [], ["a b"], None),
    "noSuchField": (1,),
}
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
HEADERS = (
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
BODIES = (b"", b"[]", b"null", b"{", b"\xff", b'{"id":1,"id":2}')
SPOILS = ("wrong", "old", "missing", "twice", "unknown")


def fuzzed(draw: random.Random, count: int) -> Iterator[Request]:
    """Usual calls with up to three changes, most of them with one."""
    for _ in range(count):
        tool, arguments = draw.choice(CALLS)
        arguments, more, spoil = dict(arguments), dict[str, Any](), ""
        request = usual(tool)
        headers, line = dict(request.headers), request.line
        for _ in range(draw.choice((0, 0, 1, 1, 1, 2, 3))):
            match draw.randrange(8):
                case 0:
                    name, value = draw.choice(HEADERS)
                    headers[name] = value
                case 1:
                    more |= draw.choice(DOCUMENTS)
                case 2:
                    spoil = draw.choice(SPOILS)
                case 3 if draw.random() < 0.3:
                    line = draw.choice(LINES)
                case 4 if draw.random() < 0.3:
                    del headers[draw.choice(list(headers))]
                case _:
                    fitting = [one for one in ARGUMENTS if one in arguments or draw.random() < 0.2]
                    name = draw.choice(fitting or ["noSuchField"])
                    arguments[name] = draw.choice(ARGUMENTS[name])
        document = call_document(tool, **arguments) | more
        body = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
        if draw.random() < 0.05:
            body = draw.choice((*BODIES, body[:-1], body + b" ", b" " + body))
        yield Request(line, list(headers.items()), body, spoil)


def with_one_change() -> Iterator[Request]:
    """A usual call with each unusual header, form, line, body and signature; each tool with each argument."""
    for name, value in HEADERS:
        call = usual("mark_read", messageIds=["nobody"])
        yield call._replace(headers=list({**dict(call.headers), name: value}.items()))
    for change in DOCUMENTS:
        call = usual("mark_read", messageIds=["nobody"])
        yield call._replace(body=json.dumps(json.loads(call.body) | change).encode())
    for line in LINES:
        yield usual("mark_read", messageIds=["nobody"])._replace(line=line)
    for body in BODIES:
        yield usual("mark_read")._replace(body=body)
    for spoil in SPOILS:
        yield usual("mark_read", messageIds=["nobody"])._replace(spoil=spoil)
    for tool, arguments in CALLS:
        yield usual(tool, **arguments)
        for field in MODELS[tool].model_fields.values():
            for value in ARGUMENTS.get(str(field.alias), ()):
                yield usual(tool, **arguments | {str(field.alias): value})


def test_both_ways_answer_each_unusual_form_alike(shared_gateway: McpGateway, sides: list[Side]) -> None:
    for request in with_one_change():
        answers = [side.ask(request) for side in sides]
        assert answers[0] == answers[1], request
    found = [records(shared_gateway, side) for side in sides]
    assert found[0] == found[1]
    assert any(stream.startswith(b"refused ") for stream, _ in found[0])


def test_both_ways_give_the_same_answers_and_the_same_records(
    shared_gateway: McpGateway, sides: list[Side]
) -> None:
    before, draw = direct(shared_gateway), random.Random(7)
    for request in fuzzed(draw, 120):
        answers = [side.ask(request) for side in sides]
        assert answers[0] == answers[1], request
        if draw.random() < 0.1:
            answers = [side.again() for side in sides]
            assert answers[0] == answers[1], request
    after = direct(shared_gateway)
    assert after["answered"] - before["answered"] > 20
    assert after["refused"] > before["refused"]
    found = [records(shared_gateway, side) for side in sides]
    assert found[0] == found[1]
    assert any(stream.startswith(b"refused ") for stream, _ in found[0])


def test_both_ways_refuse_messages_over_a_limit(shared_gateway: McpGateway, sides: list[Side]) -> None:
    with shared_gateway.client() as operator:
        for side in sides:
            limit = {"messages_per_minute": 3}
            assert operator.post(f"/api/hub/limits/name/{side.name}", json=limit).status_code == 200
        try:
            calls = [usual("send_to_agent", targetAgentId=PEER, message="one too many") for _ in range(5)]
            found = [[side.ask(call) for call in calls] for side in sides]
        finally:
            for side in sides:
                assert operator.post(f"/api/hub/limits/name/{side.name}", json={}).status_code == 200
    seconds = re.compile(rb"\d+ s\b|Seconds\":\d+|content-length: \d+")
    found = [[seconds.sub(b"", one) for one in answers] for answers in found]
    assert found[0] == found[1]
    assert b"rate_limited" in found[0][-1]


def test_a_signature_counts_for_one_call_whichever_way_comes_first(
    shared_gateway: McpGateway, sides: list[Side]
) -> None:
    side, careful = sides
    call = usual("send_to_agent", targetAgentId=PEER, message="once")
    for one in (side, careful):
        assert b'"isError":false' in one.ask(call)
    # The header that chooses the way is not signed.
    head, _, body = side.last.partition(b"\r\n\r\n")
    assert b"was used before" in side.send(head + b"\r\nTE: trailers\r\n\r\n" + body)
    assert b"was used before" in careful.send(careful.last.replace(b"TE: trailers\r\n", b""))


@pytest.mark.requirement("ST-96")
def test_usual_calls_are_answered_directly_and_others_passed_on_before_an_effect(
    shared_gateway: McpGateway, sides: list[Side], new_agent: Callable[[str], Agent]
) -> None:
    # Its mailbox has few messages, so that no answer is long, and one is left to be leased.
    side = Side(new_agent("fresh"), shared_gateway, {})
    side.ask(usual("send_to_agent", targetAgentId=NAME, message="the first one"))
    before = direct(shared_gateway)
    for tool, arguments in CALLS:
        assert b'"isError":false' in side.ask(usual(tool, **arguments)), tool
    after = direct(shared_gateway)
    assert after["answered"] - before["answered"] == len(CALLS)
    assert side.ask(usual("send_to_agent", targetAgentId=PEER, message="")).startswith(b"HTTP/1.1 200")
    assert direct(shared_gateway)["passed_on"] == after["passed_on"] + 1
    side.close()
