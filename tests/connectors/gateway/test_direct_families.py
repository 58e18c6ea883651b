"""The engine and the careful path treat each declared family alike: the same bytes and records (ST-90)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.connectors.gateway.both_ways import (
    HEADERS,
    SIDES,
    USUAL,
    Sender,
    changed,
    close_all,
    direct,
    pair,
    paired,
    records_of,
)
from tests.connectors.gateway.hub_stack import HubStack
from trunkline_agent.mcp.signing import new_key_pair

pytestmark = pytest.mark.requirement("ST-90")

HUB = "/api/hub"
# Random values, moments, and how often an address was called meanwhile.
OWN = re.compile(
    rb'(content-length: |"(?:token|secret|expiry|issued|key_id|pending|succeeded|failed|failures_in_a_row|'
    rb'last_failure|last_failure_at)":)("[^"]*"|\d+|null)'
)
# Secrets that are sealed, hashes and ids of keys.
LONG = re.compile(r"[A-Za-z0-9+/=_-]{16,}")
NOTHING: dict[str, tuple[Any, ...]] = {"no_such_field": (1,)}
NOTES = {**NOTHING, "reason": ("because", "", "x" * 501, "a\u0000b", 7, None)}
SCHEDULE = {"recipient": "$NAME", "type": "ask", "every_s": 3600}
SCHEDULES: dict[str, tuple[Any, ...]] = {
    **NOTHING,
    "recipient": ("hub", "nobody-of-this-name", "a b", None),
    "type": (" ", "a\nb", 3),
    "every_s": (7200, 0, 7200.0, "60", None),
    "cron": ("0 9 * * 1-5", "never", None),
    "payload": ({"text": "hello"}, "x" * 65_540, 2**70),
    "missed": ("latest", "some"),
}
WEBHOOKS: dict[str, tuple[Any, ...]] = {
    **NOTHING,
    "url": ("http://example.org/a", "https://127.0.0.1/a", "x", 5, None),
    "topic": ("$SIDE.topic", "a b"),
    "overlap_s": (60, -1, 1.5),
}
LIMITS: dict[str, tuple[Any, ...]] = {
    **NOTHING,
    "pending_most": (100, 0, -1, 5.0, "5", None),
    "messages_per_minute": (1000, 0),
}
PRINCIPALS: dict[str, tuple[Any, ...]] = {
    **NOTHING,
    "principal": ("$SIDE.p", "hub", "operator", "$NAME", "a b", None),
    "role": ("viewer", "operator", "king", None),
}
SESSIONS: dict[str, tuple[Any, ...]] = {
    **NOTHING,
    "session": ("$SIDE.other", "a b", None),
    "host": ("h1", "", 5),
    "for_job": ("0a1b2c3d", "x"),
}
STOPS = {**NOTES, "mode": ("soft", "hard", "stop", "gently"), "graceful": (True, 1)}
JOINS: dict[str, tuple[Any, ...]] = {
    **NOTHING,
    "agent_name": ("$SIDE.a2", "hub", "$NAME", "a b"),
    "public_key": ("$OTHER", "no key", 5),
    "task": ("some work", "x" * 100_000),
    "capabilities": (["a"], ["a b"], "a"),
}
# Role, path, body and values of its fields.
CHANGES: tuple[tuple[str, str, dict[str, Any], dict[str, tuple[Any, ...]]], ...] = (
    ("worker", "/schedules/$SIDE.s", SCHEDULE, SCHEDULES),
    ("worker", "/schedules/$SIDE.s/remove", {}, NOTHING),
    ("worker", "/webhooks/$NAME", {"url": "https://example.org/a"}, WEBHOOKS),
    ("operator", "/webhooks/$SIDE.w", {"url": "https://example.org/a", "topic": "$SIDE.topic"}, WEBHOOKS),
    ("worker", "/webhooks/$NAME/pause", {}, NOTES),
    ("worker", "/webhooks/$NAME/resume", {}, NOTHING),
    ("worker", "/webhooks/$NAME/remove", {}, NOTHING),
    ("operator", "/limits/name/$SIDE.p", {"pending_most": 50}, LIMITS),
    ("operator", "/limits/role/$SIDE.r", {"live_jobs_most": 50}, LIMITS),
    ("operator", "/limits/all/$SIDE.p", {}, LIMITS),
    ("operator", "/mqtt-load", {"agents": {"$SIDE.p": 3}}, {**NOTHING, "jobs": ({"x": 1}, {"0a1b2c3d": 0})}),
    ("operator", "/principals", {"principal": "$SIDE.p", "role": "worker"}, PRINCIPALS),
    ("operator", "/principals/$SIDE.p/revoke", {}, NOTHING),
    ("delegator", "/sessions", {"session": "$SIDE.session"}, SESSIONS),
    ("delegator", "/sessions/$SIDE.session/stop", {}, STOPS),
    ("delegator", "/sessions/$SIDE.session/resume", {}, {**NOTHING, "host": ("h1", "a b")}),
    ("delegator", "/jobs/$JOB/cancel", {}, NOTES),
    ("delegator", "/tasks/$TASK/complete", {}, {**NOTHING, "result": ({"a": 1}, "done", 2**70)}),
    ("delegator", "/tasks/$LAST/fail", {"error": "broken"}, {**NOTHING, "error": ("", None, 7)}),
    ("delegator", "/tasks/$TASK/cancel", {}, NOTES),
    ("delegator", "/tokens/$TID/revoke", {}, NOTES),
    ("operator", "/participants", {"agent_name": "$SIDE.a", "public_key": "$PEM"}, JOINS),
    ("operator", "/participants/$SIDE.a/keys", {"public_key": "$OTHER"}, {**JOINS, "overlap_s": (60, -1)}),
    ("operator", "/participants/$SIDE.known/keys/$KID/remove", {}, NOTHING),
    ("operator", "/agents/$SIDE.m/mqtt/remove", {}, NOTHING),
)
READS = (
    "/schedules",
    "/schedules/side0.s",
    "/webhooks",
    "/webhooks/side0.w",
    "/limits",
    "/principals",
    "/sessions",
    "/sessions/side0.session",
    "/jobs",
    "/jobs/$JOB",
    "/tasks",
    "/tasks/$TASK",
    "/tokens",
    "/containers",
    "/agents",
    "/agents/idle",
    "/mqtt-agents",
    "/participants/side0.a",
    "/listeners",
    "/threads",
)
ROLES = ("worker", "delegator", "viewer", "agent", "operator")
QUERIES = (b"", b"", b"", b"?limit=1", b"?x=1")


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(scope="module")
def roles(hub: HubStack) -> dict[str, list[Sender]]:
    """A sender of each role for each way."""
    found = {role: pair(hub, role) for role in ("worker", "delegator", "viewer")}
    found["agent"] = paired(hub, [("idle", hub.submit("idle").token) for _ in SIDES])
    found["operator"] = paired(hub, [("operator", hub.gateways[0].operator_token)] * 2)
    for place, side in enumerate(SIDES):
        names = {role.upper(): found[role][place].name for role in ("worker", "delegator", "viewer")}
        words = names | _things(hub, found["delegator"][place].token, side)
        for senders in found.values():
            senders[place].words = words
    return found


def _things(hub: HubStack, token: str, side: str) -> dict[str, str]:
    """Make what a delegator may change, and return the ids, and keys as text in JSON."""
    client = hub.client(token)
    job = client.post(f"{HUB}/jobs", json={"description": "a job"}).json()["job_id"]
    tasks = [hub.submit("idle", at=client).id for _ in range(2)]
    assert hub.operator.post(f"{HUB}/agents/{side}.m/mqtt").status_code == 201
    known = {"agent_name": f"{side}.known", "public_key": new_key_pair()[1]}
    key_id = hub.operator.post(f"{HUB}/participants", json=known).json()["keys"][0]["key_id"]
    pems = {"PEM": new_key_pair()[1], "OTHER": new_key_pair()[1], "KNOWN": known["public_key"]}
    keys = {name: json.dumps(pem)[1:-1] for name, pem in pems.items()}
    tokens = dict(zip(("TID", "UID"), (hub.token_of(task)["token_id"] for task in tasks), strict=True))
    return {"JOB": job, "TASK": tasks[0], "LAST": tasks[1], "KID": key_id, **tokens, **keys}


def requests(draw: random.Random, count: int) -> Iterator[tuple[str, bytes, list[bytes], bytes]]:
    """The role of the sender, and requests that change something."""
    for number in range(count):
        # Each one first without a change.
        is_first = number < len(CHANGES)
        role, path, said, values = CHANGES[number] if is_first else draw.choice(CHANGES)
        target = f"{HUB}{path}".encode()
        if is_first:
            body = json.dumps(said).encode() if said else b""
            yield role, b"POST %b HTTP/1.1" % target, [*USUAL, b"Content-Length: $LENGTH"], body
            continue
        role = draw.choice((role, role, role, role, *ROLES))
        line, headers, body = changed(draw, b"POST", target, dict(said), values, QUERIES)
        if draw.random() < 0.3:
            headers.append(draw.choice(HEADERS[:2]))
        yield role, line, headers, b"" if body == b"{}" else body


@pytest.mark.parametrize("seed", range(2))
def test_both_ways_give_the_same_answer_and_the_same_records_of_each_family(
    hub: HubStack, roles: dict[str, list[Sender]], seed: int
) -> None:
    before = direct(hub)
    for role, line, headers, body in requests(random.Random(seed), 300):
        if b"Content-Length: 3" in headers and len(body) < 3:
            continue
        answers = [OWN.sub(rb"\1", side.ask(line, headers, body)) for side in roles[role]]
        assert answers[0] == answers[1], (role, line, headers, body)
    assert direct(hub)["answered"] - before.get("answered", 0) > 20

    for role in ("worker", "delegator"):
        left, right = (_records(hub, one) for one in roles[role])
        for one, other in zip(left, right, strict=True):
            assert one == other
        assert len(left) > 3


def _records(hub: HubStack, sender: Sender) -> list[str]:
    """Return the records of one side without refusals, whose number depends on the time."""
    return [LONG.sub("LONG", one) for one in records_of(hub, sender)[0]]


@pytest.mark.parametrize("query", ["", "?limit=1", "?limit=0", "?after=side0"])
@pytest.mark.parametrize("role", ["operator", "delegator", "viewer"])
def test_both_ways_show_the_same_of_each_family(
    hub: HubStack, roles: dict[str, list[Sender]], role: str, query: str
) -> None:
    sender, before = roles[role][0], direct(hub)
    for path in READS:
        line = f"GET {HUB}{path}{query} HTTP/1.1".encode()
        assert sender.ask(line, USUAL) == sender.ask(line, USUAL, is_careful=True), path
    if role == "operator" and not query:
        # All but the lists of what may be long: schedules, jobs, tasks, tokens and threads.
        begun = sum(direct(hub)[how] - before.get(how, 0) for how in ("answered", "refused"))
        assert begun >= len(READS) - 5
