"""Direct calls of the tools of topics and broadcasts answer and record as the careful path does (ST-95)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
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
from tests.connectors.doors.mcp_tools.conftest import McpGateway

pytestmark = pytest.mark.requirement("ST-95")

OWN, COMMON = f"{NAME}-news", "news"
LIMITS = "/api/hub/limits/name"
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("subscribe", {"topic": OWN}),
    ("subscribe", {"topic": COMMON}),
    ("publish_message", {"topic": OWN, "message": "hello ☃"}),
    ("publish_message", {"topic": COMMON, "message": "hello"}),
    # The next topic after the name is the agent's own one.
    ("list_topics", {"after": f"{NAME}-m", "limit": 1}),
    ("unsubscribe", {"topic": OWN}),
    ("broadcast_message", {"message": "hello"}),
)
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("publish_message", {"topic": "of-nobody", "message": "x"}),
    ("unsubscribe", {"topic": "of-nobody"}),
    *(("publish_message", {"topic": COMMON, "message": one, "idempotencyKey": "r"}) for one in ("x", "y")),
    *(("broadcast_message", {"message": one, "idempotencyKey": "r"}) for one in ("x", "y")),
)
# No time comes to its end within the tests, because the two ways would see it at different requests.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "topic": (OWN, COMMON, "of-nobody", "", "a b", "n" * 128, "n" * 129, 7, None),
    "message": ("x", "", "☃\u2028\U0001f600", "\x00\x01", "\ud800", 5, None, "y" * 3000, "z" * 70_000),
    "priority": ("low", "high", "urgent", None),
    "ttlSeconds": (3600, 0, -1, "1", 1e9, 3600.5),
    "delaySeconds": (3600, 0, None, 7200),
    "expiresInSeconds": (3600, 0, 3600.5),
    "deliverAfterSeconds": (3600, None, 7200),
    "thread": ("t1", None, 5),
    "inReplyTo": ("m1",),
    "blob": (None, "0" * 64, "x"),
    "idempotencyKey": ("key-1", "key-1", "key-2", "a b", "k" * 256, None, 5),
    "limit": (1, 0, 1001, 1.0, True, "3"),
    "after": (f"{NAME}-m", "zzz", "", "a b", 5),
    "subscriber": (PEER,),
    "noSuchField": (1,),
}


@pytest.fixture(scope="module")
def sides(shared_gateway: McpGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Side]]:
    """An agent for each way."""
    with both_sides(shared_gateway, tmp_path_factory.mktemp("sides")) as found:
        yield found


def requests() -> Iterator[Request]:
    """Calls that the log refuses, each tool with each value of each argument, and ones with several changes."""
    for tool, arguments in REFUSED:
        yield usual(tool, **arguments)
    for tool, arguments in CALLS:
        yield usual(tool, **arguments)
        for field in MODELS[tool].model_fields.values():
            for value in ARGUMENTS[str(field.alias)]:
                yield usual(tool, **arguments | {str(field.alias): value})
    draw = random.Random(7)
    for _ in range(30):
        tool, arguments = draw.choice(CALLS)
        names = draw.sample(sorted(ARGUMENTS), draw.randint(1, 3))
        yield usual(tool, **arguments | {name: draw.choice(ARGUMENTS[name]) for name in names})


def both(sides: list[Side], tool: str, **arguments: Any) -> bytes:
    """Return the answer of both ways to a call, without the seconds to wait."""
    seconds = re.compile(rb"\d+ s\b|Seconds\\?\":\s?\d+|content-length: \d+")
    call = usual(tool, **arguments)
    first, second = (seconds.sub(b"", side.ask(call)) for side in sides)
    assert first == second
    return first


@pytest.mark.requirement("ST-96")
def test_usual_calls_of_topics_and_broadcasts_are_answered_directly(
    shared_gateway: McpGateway, sides: list[Side]
) -> None:
    for tool, arguments in CALLS:
        before = direct(shared_gateway)["answered"]
        assert b'"isError":false' in sides[0].ask(usual(tool, **arguments)), tool
        assert direct(shared_gateway)["answered"] == before + 1, tool
        assert b'"isError":false' in sides[1].ask(usual(tool, **arguments)), tool
        assert direct(shared_gateway)["answered"] == before + 1, tool


def test_both_ways_give_the_same_answers_and_records_of_topics_and_broadcasts(
    shared_gateway: McpGateway, sides: list[Side]
) -> None:
    before = direct(shared_gateway)
    for request in requests():
        answers = [side.ask(request) for side in sides]
        assert answers[0] == answers[1], request
    after = direct(shared_gateway)
    assert after["answered"] - before["answered"] > 50
    assert after["refused"] - before["refused"] >= 4
    found = [records(shared_gateway, side) for side in sides]
    assert found[0] == found[1]


def test_both_ways_refuse_what_exceeds_a_limit_of_topics_and_broadcasts(
    shared_gateway: McpGateway, sides: list[Side]
) -> None:
    before = direct(shared_gateway)["refused"]
    with shared_gateway.client() as operator:
        for side in sides:
            limits = {"messages_per_minute": 1, "subscriptions_most": 1}
            assert operator.post(f"{LIMITS}/{side.name}", json=limits).status_code == 200
        try:
            assert b"unknown_stream" in both(sides, "unsubscribe", topic="of-nobody-at-all")
            for topic in (f"{NAME}-1", f"{NAME}-2"):
                subscribed = both(sides, "subscribe", topic=topic)
            assert b"limit_reached" in subscribed
            for tool, about in (("publish_message", {"topic": COMMON}), ("broadcast_message", {})):
                for _ in range(2):
                    sent = both(sides, tool, message="one too many", **about)
                assert b"rate_limited" in sent
        finally:
            for side in sides:
                assert operator.post(f"{LIMITS}/{side.name}", json={}).status_code == 200
    assert direct(shared_gateway)["refused"] >= before + 4
    found = [records(shared_gateway, side) for side in sides]
    assert found[0] == found[1]


def test_a_direct_call_has_the_number_of_full_mailboxes(shared_gateway: McpGateway, sides: list[Side]) -> None:
    """A publication waits for the copies, and its answer comes after that."""
    topic = f"{NAME}-full"
    with shared_gateway.client() as operator:
        for side in sides:
            assert b'"subscribed":true' in side.ask(usual("subscribe", topic=topic))
            assert operator.post(f"{LIMITS}/{side.name}", json={"pending_most": 1}).status_code == 200
            side.ask(usual("send_to_agent", targetAgentId=NAME, message="the last one"))
        before = direct(shared_gateway)["answered"]
        try:
            assert b'"recipientCount":0,"full":1' in both(sides, "publish_message", topic=topic, message="x")
            for side in sides:
                found = side.ask(usual("broadcast_message", message="x"))
                assert b'"full":1' in found, "the other side's mailbox is full, too"
            assert direct(shared_gateway)["answered"] == before + 2
        finally:
            for side in sides:
                assert operator.post(f"{LIMITS}/{side.name}", json={}).status_code == 200
