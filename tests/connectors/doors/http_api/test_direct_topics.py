"""The engine and the careful path treat topics, marks and replays alike: the same bytes and records (ST-90)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.hub.engine.engine import Engine
from connectors.hub.engine.operation import Operation
from connectors.hub.live.live_view import LiveView
from connectors.hub.services.hub import Hub
from connectors.operations.topics.topic_operations import TOPICS
from connectors.programs.gateway_program.application import build_application
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from tests.connectors.doors.http_api.both_ways import (
    HEADERS,
    SIDES,
    USUAL,
    VALUES,
    Sender,
    changed,
    close_all,
    direct,
    pair,
    paired,
    records_of,
    two_principals,
)
from tests.connectors.doors.http_api.hub_stack import MESSAGES, HubStack, post

pytestmark = pytest.mark.requirement("ST-90")


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


LIMITS = "/api/hub/limits"
NAMES = ("$SIDE.a", "$SIDE.a", "$SIDE.b", "$SIDE.full", "$SIDE.unknown", "$SIDE" + "x" * 123)
ODD_NAMES = (
    "$SIDE" + "x" * 124,
    "-a",
    ".",
    "..",
    "$SIDE~a",
    "$SIDE.a/",
    "",
    "$SIDE.a/b",
    "$SIDE%2Ea",
    "$SIDE%2ea",
)
ODD_NAMES += ("$SIDE.%61", "$SIDE%20", "$SIDE.a;b", "$SIDE.a%", "$SIDE%2Fa", "$SIDE.\xff")
SUBSCRIBERS = (None, "$NAME", "$BOX", "operator", "nobody-of-this-name", "", "a b", 7, ["$NAME"])
IDS = ("$READ", "$LEASED", "$DEAD", "$DEAD", "$FRESH", "nobody")
TOPIC_VALUES = {name: values for name, values in VALUES.items() if name != "recipient"} | {
    "blob": (None, None, "0" * 64, "x", "$BLOB", "$BLOB")
}
READ_VALUES: dict[str, tuple[Any, ...]] = {
    "message_ids": ([], ["$READ", "nobody", "$READ"], ["$LEASED"], ["$DEAD"], ["$FRESH"], ["a b"], None, "x"),
    "no_such_field": (1,),
}
PAGES = (
    b"",
    b"?limit=1",
    b"?limit=0",
    b"?limit=x",
    b"?limit=1&limit=2",
    b"?after=$NAME",
    b"?after=%20",
    b"?x=1",
)
MAILBOXES = (
    "default/$NAME",
    "default/$NAME",
    "default/$WORKER",
    "default/$BOX",
    "other/$NAME",
    "default/a%20b",
)


def topic_requests(draw: random.Random, count: int) -> Iterator[tuple[str, bytes, list[bytes], bytes]]:
    """The role of the sender, and requests about topics, marks and dead messages."""
    for _ in range(count):
        role = draw.choice(
            ("worker", "worker", "worker", "worker", "viewer", "restricted", "agent", "operator")
        )
        name, what = draw.choice(ODD_NAMES if draw.random() < 0.2 else NAMES), draw.random()
        path, said, values = f"{TOPICS}/{name}".encode("latin-1"), dict[str, Any](), {"no_such_field": (1,)}
        method, queries = b"POST", (b"", b"", b"", b"?limit=1")
        if what < 0.35:
            said, values = {"type": "note"}, TOPIC_VALUES
        elif what < 0.65:
            path += draw.choice((b"/subscribe", b"/subscribe", b"/subscribe", b"/unsubscribe", b"/Subscribe"))
            values = {"subscriber": SUBSCRIBERS, "no_such_field": (1,)}
        elif what < 0.8:
            method, queries = b"GET", PAGES
        elif what < 0.9:
            role, path, values = "worker", MESSAGES.encode() + b"/read", READ_VALUES
            said = {"message_ids": draw.sample(IDS, 2)}
        else:
            path = f"/api/hub/mailboxes/{draw.choice(MAILBOXES)}/messages/{draw.choice(IDS)}/replay".encode()
            role = draw.choice(("worker", "worker", role))
        line, headers, body = changed(draw, method, path, said, values, queries)
        if draw.random() < 0.3:
            headers.append(draw.choice(HEADERS[:2]))
        yield role, line, headers, b"" if body == b"{}" else body


def with_messages(hub: HubStack, sender: Sender, box: str) -> None:
    """Give a sender messages that it can mark or replay, and fill a mailbox that follows a topic."""
    client, ids = hub.client(sender.token), list[str]()
    sender.words |= {"BOX": box, "WORKER": sender.name}
    assert hub.operator.post(f"{LIMITS}/name/{box}", json={"pending_most": 1}).status_code == 200
    assert post(hub.operator, box).status_code == 200
    answer = hub.operator.post(f"{TOPICS}/{sender.side}.full/subscribe", json={"subscriber": box})
    assert answer.status_code == 200
    for _ in range(4):
        ids.append(post(hub.operator, sender.name).json()["message_id"])
    # The oldest one dies, the next one stays leased.
    for _ in range(hub.settings.gateway.max_attempts):
        lease = client.get(MESSAGES, params={"lease": 300, "limit": 1}).json()["lease_id"]
        named = {"lease_id": lease, "message_ids": ids[:1]}
        assert client.post(f"{MESSAGES}/nack", json=named).json()["done"] == ids[:1]
    assert client.get(MESSAGES, params={"lease": 3600, "limit": 1}).json()["messages"][0]["id"] == ids[1]
    sender.words |= dict(zip(("DEAD", "LEASED", "READ", "FRESH"), ids, strict=True))
    sender.words["BLOB"] = hub.operator.put("/api/hub/blobs", content=b"content").json()["digest"]


@pytest.fixture(scope="module")
def roles(hub: HubStack) -> dict[str, list[Sender]]:
    """A sender of each role for each way."""
    found = {role: pair(hub, role) for role in ("worker", "viewer")}
    for one, (box, _) in zip(found["worker"], two_principals(hub, "worker"), strict=True):
        with_messages(hub, one, box)
    for role, agent in (("agent", "idle"), ("restricted", "quiet")):
        found[role] = paired(hub, [(agent, hub.submit(agent).token) for _ in SIDES])
    token = hub.gateways[0].operator_token
    found["operator"] = paired(hub, [("operator", token)] * 2)
    for role in ("viewer", "agent", "restricted", "operator"):
        for one, other in zip(found[role], found["worker"], strict=True):
            one.words = other.words
    return found


@pytest.mark.parametrize("seed", range(3))
def test_both_ways_give_the_same_answer_and_the_same_records_of_topics(
    hub: HubStack, roles: dict[str, list[Sender]], seed: int
) -> None:
    before = direct(hub)
    for role, line, headers, body in topic_requests(random.Random(seed), 300):
        if b"Content-Length: 3" in headers and len(body) < 3:
            continue
        answers = [side.ask(line, headers, body) for side in roles[role]]
        assert answers[0] == answers[1], (role, line, headers, body)
    assert direct(hub)["answered"] - before.get("answered", 0) > 50

    # The records of refusals come a little later.
    for _ in range(10):
        left, right = (records_of(hub, one) for one in roles["worker"])
        if left == right:
            break
    assert left == right
    assert len(left[0]) > 20


LENGTH = b"Content-Length: $LENGTH"


def test_both_ways_list_the_same_and_keep_the_same_limits(hub: HubStack) -> None:
    limited = pair(hub, "worker")
    for one in limited:
        one.side = one.side.replace("side", "list")
        limits = {"messages_per_minute": 1, "subscriptions_most": 1}
        assert hub.operator.post(f"{LIMITS}/name/{one.name}", json=limits).status_code == 200
    before = direct(hub)
    steps = (
        (b"/$SIDE.l/subscribe", b"", 200),
        (b"/$SIDE.m/subscribe", b"{}", 429),
        (b"/$SIDE.l/unsubscribe", b"", 200),
        # The subscription that was refused counts no longer.
        (b"/$SIDE.m/subscribe", b"", 200),
        (b"/$SIDE.m", b'{"type": "note", "payload": 1}', 200),
        (b"/$SIDE.m", b'{"type": "note", "payload": 2}', 429),
        (b"/$SIDE.m", b'{"type": " "}', 403),
    )
    for path, body, status in steps:
        line = b"POST %b%b HTTP/1.1" % (TOPICS.encode(), path)
        answers = [re.sub(rb"retry-after: \d+", b"", one.ask(line, (*USUAL, LENGTH), body)) for one in limited]
        assert answers[0] == answers[1]
        assert int(answers[0][9:12]) == status
    assert records_of(hub, limited[0])[0] == records_of(hub, limited[1])[0]
    # A list has the topics of both sides, so one sender asks for it twice.
    for query in ("", "?limit=2&after=list0", "?limit=0", "?limit=101", "/list0.m", "/list0.m?limit=1000"):
        request = f"GET {TOPICS}{query} HTTP/1.1".encode()
        assert limited[0].ask(request, USUAL) == limited[0].ask(request, USUAL, is_careful=True)
    counts = {name: direct(hub)[name] - before.get(name, 0) for name in ("answered", "refused")}
    # Both sides of the sender that asks as it is, and none of the requests to the careful path.
    assert counts == {"answered": 7, "refused": 3}


def test_the_engine_finds_the_operation_of_each_path_and_no_other() -> None:
    settings, keyring = Settings(), Keyring({"test": bytes(32)}, "test")
    app = build_application(Hub(settings, keyring, "test", LiveView(settings, keyring)))
    engine = app.state.engine
    found = {
        operation.route: values
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if (operation := _found(engine, method, path, values := re.findall(r"{(\w+)}", path))) is not None
    }
    assert found == {one.route: list(one.parameters) for one in engine._operations.values()}
    assert len(found) > 50
    for path in ("/a%20b", "/a%2Db", "/", "/a/b", "/a;b", "/a/subscribe/", "/a//subscribe", "/ä", "/a#b"):
        assert engine.find(f"POST {TOPICS}{path} HTTP/1.1".encode())[0] is None


def _found(engine: Engine, method: str, path: str, names: list[str]) -> Operation | None:
    """Return the operation of a path, whose parameters have their names as values."""
    plain = re.sub(r"[{}]", "", path)
    operation, values, query = engine.find(f"{method.upper()} {plain}?limit=1 HTTP/1.1".encode())
    if operation is None:
        return None
    assert (operation.PATH, [one.decode() for one in values], query) == (path, names, b"limit=1")
    return operation
