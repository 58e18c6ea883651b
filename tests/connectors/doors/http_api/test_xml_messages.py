"""`POST /messages` and the routes of pumps (XP-04, XP-05, XP-07, XP-08, XP-15): the gateway's side of the pump,
asked as a pump would ask it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from lxml import etree

from connectors.log.publisher import Publisher
from schemas.streams.control.organism import Listener, OrganismLoaded
from schemas.streams.mailboxes.mailbox_bodies import MailboxClosing
from schemas.streams.mailboxes.message import Message
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess, add_principal, limit_to_one
from trunkline_agent.mcp.signing import new_key_pair

SEARCH = "urn:test:search"
XML = {"Content-Type": "application/xml"}
LISTENERS = [
    Listener(name="fast", root_tag="search", namespace=SEARCH, concurrency=4),
    Listener(name="slow", root_tag="search", namespace=SEARCH),
    Listener(name="boss", root_tag="order", namespace="urn:test:order", visible_tools=["fast"]),
    Listener(name="early", root_tag="boot"),
    Listener(name="counted", root_tag="count", per_minute=3),
]


def document(payload: str, head: str = "") -> str:
    """An envelope around a payload."""
    return f'<message xmlns="urn:trunkline:envelope:1">{head}{payload}</message>'


def search(query: str = "x") -> str:
    """A payload for `fast` and `slow`."""
    return f'<search xmlns="{SEARCH}"><query>{query}</query></search>'


def local(payload: bytes) -> dict[str, Any]:
    """The text of a payload's children, by local name."""
    return {etree.QName(child).localname: child.text for child in etree.fromstring(payload)}


class Organism:
    """A gateway with listeners, and what a pump and the operator do there."""

    def __init__(self, gateway: GatewayProcess, operator: httpx.Client, publisher: Publisher) -> None:
        self.gateway, self.operator = gateway, operator
        loaded = OrganismLoaded(request_id=uuid.uuid4().hex, digest="0" * 64, listeners=LISTENERS)
        publisher.append(loaded.record(door="stack", principal="operator")).result(10)
        wait_until(lambda: self.listeners()["version"] == 1, what="the organism is loaded")

    def listeners(self) -> dict[str, Any]:
        return dict(self.operator.get("/api/hub/listeners").json())

    def post(self, payload: str, client: httpx.Client | None = None, head: str = "", **params: str) -> Any:
        return (client or self.operator).post(
            "/messages", content=document(payload, head), headers=XML, params=params
        )

    def lease(
        self, *names: str, free: int = 10, alone: bool = False, pump: str = "p1", wait_ms: int = 10_000
    ) -> Any:
        body = {"pump": pump, "wants": dict.fromkeys(names, 10), "free": free, "alone": alone}
        answer = self.operator.post("/api/hub/pump/lease", json={**body, "wait_ms": wait_ms, "version": 1})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def settle(self, message: dict[str, Any], *answers: dict[str, Any], outcome: str = "handled") -> Any:
        named = {name: message[name] for name in ("listener", "message_id", "request_id")}
        done = {**named, "outcome": outcome, "answers": list(answers)}
        answer = self.operator.post("/api/hub/pump/settle", json={"pump": "p1", "done": [done]})
        assert answer.status_code == 200, answer.text
        return answer.json()["results"][0]

    def mailbox(self, name: str, **params: Any) -> list[dict[str, Any]]:
        return list(self.operator.get(f"/api/hub/mailboxes/default/{name}", params=params).json()["messages"])


@pytest.fixture
def organism(gateway: GatewayProcess, operator: httpx.Client, publisher: Publisher) -> Iterator[Organism]:
    """One gateway with five listeners."""
    yield Organism(gateway, operator, publisher)


@pytest.mark.requirement("XP-05")
@pytest.mark.requirement("XP-07")
def test_a_broadcast_is_answered_by_each_on_the_askers_thread_and_nobody_sees_the_others(
    organism: Organism,
) -> None:
    token = add_principal(organism.operator, "ann", "worker")
    with organism.gateway.client(token) as ann:
        answer = organism.post(search(), ann, head="<from>operator</from>")
        assert answer.status_code == 202, answer.text
        accepted = etree.fromstring(answer.content)
        thread = accepted.get("thread")
        assert sorted(one.get("to") for one in accepted) == ["fast", "slow"]
        leased = {one["listener"]: one for one in organism.lease("fast", "slow")["messages"]}
        assert (
            len(leased) == 2
            or leased.update({one["listener"]: one for one in organism.lease("fast", "slow")["messages"]})
            is None
        )
        assert {one["sender"] for one in leased.values()} == {"ann"}  # and not who it said it was
        assert len({thread, *(one["thread"] for one in leased.values())}) == 3
        found = {"kind": "found", "body": '<found xmlns="urn:test:found"><n>1</n></found>'}
        assert organism.settle(leased["fast"], found)["verdict"] == "accepted"
        # The slow one is not done yet.
        wait_until(lambda: len(organism.mailbox("ann")) == 1, what="the fast answer")
        (first,) = organism.mailbox("ann")
        assert (first["sender"], first["kind"], first["thread"]) == ("fast", "found", thread)
        assert organism.settle(leased["slow"], found)["verdict"] == "accepted"
        wait_until(lambda: len(organism.mailbox("ann")) == 2, what="the slow answer")
        assert {one["thread"] for one in organism.mailbox("ann")} == {thread}
        # The tree is the operator's to see.
        assert ann.get("/api/hub/threads").status_code == 403
        wait_until(
            lambda: len(organism.operator.get("/api/hub/threads").json()["threads"]) == 2, what="threads"
        )
        tree = organism.operator.get("/api/hub/threads", params={"root": thread}).json()["threads"]
        assert {(one["opened_by"], one["seen_by"], one["on_behalf_of"]) for one in tree} == {
            ("ann", "fast", "ann"),
            ("ann", "slow", "ann"),
        }
        # The thread that the sender was told is the root of that tree.
        root = organism.operator.get(f"/api/hub/threads/{thread}")
        assert root.status_code == 200, root.text
        shown = root.json()
        assert (shown["thread"], shown["parent_thread"], shown["root_thread"]) == (thread, None, thread)
        assert (shown["opened_by"], shown["seen_by"], shown["on_behalf_of"]) == ("ann", "ann", "ann")
        assert shown["opened_at"] == min(one["opened_at"] for one in tree)
        assert organism.operator.get(f"/api/hub/threads/{uuid.uuid4()}").status_code == 404


@pytest.mark.requirement("XP-06")
@pytest.mark.requirement("XP-09")
def test_a_listener_that_asks_another_gets_its_answer_and_then_answers_who_asked_it(organism: Organism) -> None:
    organism.post('<order xmlns="urn:test:order"></order>')
    (order,) = organism.lease("boss")["messages"]
    organism.settle(order, {"kind": "search", "namespace": SEARCH, "body": search()})
    # The boss sees `fast` alone.
    (asked,) = organism.lease("fast", "slow")["messages"]
    assert (asked["listener"], asked["sender"], asked["is_reply"]) == ("fast", "boss", False)
    organism.settle(asked, {"kind": "found", "body": "<found></found>"})
    (reply,) = organism.lease("boss")["messages"]
    assert (reply["sender"], reply["thread"], reply["is_reply"]) == ("fast", order["thread"], True)
    history = organism.operator.post(
        "/api/hub/pump/history", json={"listener": "boss", "thread": order["thread"]}
    ).json()["messages"]
    assert [(one["kind"], one["is_own"]) for one in history] == [
        ("order", False),
        ("search", True),
        ("found", False),
    ]
    organism.settle(
        reply,
        {"kind": "report", "body": "<report></report>"},
        {"kind": "note", "to": "slow", "body": "<note></note>"},
        {"kind": "note", "to": "nobody", "body": "<note></note>"},
    )
    wait_until(lambda: organism.mailbox("operator"), what="the report")
    (report,) = organism.mailbox("operator")
    assert (report["sender"], report["kind"]) == ("boss", "report")
    # A listener that it does not see does not exist for it.
    wait_until(lambda: len(organism.mailbox("boss", pending=True)) == 2, what="two <huh>")
    told = [local(one["body"].encode()) for one in organism.mailbox("boss", pending=True)]
    assert [one["step"] for one in told] == ["routing", "routing"] and told[0] == told[1]
    assert organism.mailbox("slow") == []


@pytest.mark.requirement("XP-02")
@pytest.mark.requirement("XP-15")
def test_what_is_wrong_is_told_by_a_huh_or_refused_and_is_in_the_ledger(organism: Organism) -> None:
    post = organism.operator.post
    for content, step in (
        (document('<unheard xmlns="urn:un"></unheard>'), "routing"),
        (document('<search xmlns="urn:other"></search>'), "routing"),
        (document(search(), "<to>nobody</to>"), "routing"),
        (search(), "envelope"),
        (document(search() + search()), "envelope"),
    ):
        answer = post("/messages", content=content, headers=XML)
        assert answer.status_code == 422, answer.text
        assert local(answer.content)["step"] == step
    bomb = '<!DOCTYPE m [<!ENTITY a "b">]>' + document(search())
    assert post("/messages", content=bomb, headers=XML).json()["reason"] == "malformed"
    assert post("/messages", content=b"<a>" * 300_000, headers=XML).status_code == 413
    assert post("/messages", content=b"{}", headers={"Content-Type": "application/json"}).status_code == 415
    assert (
        organism.operator.post(
            "/messages", content=document(search()), headers={**XML, "Authorization": ""}
        ).status_code
        == 401
    )
    assert organism.lease("fast", "slow", wait_ms=0)["messages"] == []


def test_an_agent_over_mqtt_may_not_have_a_listeners_name_and_that_is_recorded(
    organism: Organism, read_topic: Callable[[], list[Any]]
) -> None:
    answer = organism.operator.post("/api/hub/agents/fast/mqtt")
    assert (answer.status_code, answer.json()["reason"]) == (403, "policy")
    refusal = wait_until(lambda: [r.value for r in read_topic() if r.key == b"refused/http"], what="its record")
    assert b"a listener has this name" in refusal[0] and b"/api/hub/agents/{name}/mqtt" in refusal[0]
    assert organism.operator.get("/api/hub/mqtt-agents").json()["agents"] == []


@pytest.mark.requirement("XP-15")
def test_the_same_request_again_posts_nothing_more(organism: Organism) -> None:
    headers = {**XML, "Idempotency-Key": "k1"}
    first, again = (
        organism.operator.post("/messages", content=document(search()), headers=headers) for _ in range(2)
    )
    assert first.content == again.content
    assert again.headers["Trunkline-Verdict"] == "duplicate"
    assert len(organism.mailbox("fast")) == 1


@pytest.mark.requirement("XP-08")
def test_senders_take_turns_and_no_listener_gets_more_than_it_may_have_at_once(organism: Organism) -> None:
    tokens = {name: add_principal(organism.operator, name, "worker") for name in ("eve", "bob")}
    for name, count in (("eve", 6), ("bob", 2)):
        with organism.gateway.client(tokens[name]) as client:
            for number in range(count):
                assert organism.post(search(f"{name} {number}"), client, "<to>fast</to>").status_code == 202
    first = organism.lease("fast", "slow")["messages"]
    assert [one["sender"] for one in first] == ["eve", "bob", "eve", "bob"]
    assert organism.lease("fast", pump="p2", wait_ms=0)["messages"] == []
    organism.settle(first[0])
    (one,) = organism.lease("fast", pump="p2")["messages"]
    assert one["sender"] == "eve"


@pytest.mark.requirement("XP-08")
def test_no_more_a_minute_than_the_listener_may_have(organism: Organism) -> None:
    for number in range(5):
        assert organism.post(f'<count xmlns="">{number}</count>').status_code == 202
    got = organism.lease("counted")["messages"]
    assert len(got) == 3
    for message in got:
        organism.settle(message)
    assert organism.lease("counted", wait_ms=600)["messages"] == []


@pytest.mark.requirement("XP-13")
@pytest.mark.requirement("ST-80")
def test_what_was_handed_out_before_is_leased_alone_and_dead_the_third_time(organism: Organism) -> None:
    limit_to_one(organism.operator, "operator")
    organism.operator.post("/api/hub/messages", json={"recipient": "operator", "type": "note", "payload": 1})
    organism.post(search("poison"), head="<to>fast</to>")
    for attempt in (1, 2, 3):
        if attempt > 1:
            answer = organism.lease("fast", wait_ms=0)
            assert (answer["messages"], answer["suspects"]) == ([], 1)
        (message,) = organism.lease("fast", alone=attempt > 1)["messages"]
        assert message["attempts"] == attempt
        # The pump was killed, and starts again under its name.
        answer = organism.operator.post("/api/hub/pump/started", json={"pump": "p1"})
        assert answer.json()["released"] == 1
    (row,) = organism.mailbox("fast")
    assert (row["status"], row["attempts"]) == ("dead", 3)
    wait_until(lambda: len(organism.mailbox("operator")) == 2, what="the sender is told, with a full mailbox")
    told, _ = sorted(organism.mailbox("operator"), key=lambda one: str(one["kind"]))
    assert told["kind"] == "huh" and local(told["body"].encode())["about"] == "search"


@pytest.mark.requirement("XP-10")
@pytest.mark.requirement("ST-80")
def test_who_listens_for_it_gets_boot_from_the_system_when_a_pump_starts(organism: Organism) -> None:
    limit_to_one(organism.operator, "early")
    for _ in range(2):
        assert organism.operator.post("/api/hub/pump/started", json={"pump": "p1"}).json()["released"] == 0
    assert len(organism.mailbox("early")) == 2  # the second one although the mailbox is full
    boot, _ = organism.lease("early")["messages"]
    assert (boot["sender"], boot["kind"], boot["body"]) == ("system", "boot", "<boot></boot>")
    # An answer without a recipient is in the ledger, and the system reads it.
    organism.settle(boot, {"kind": "up", "body": "<up></up>"})
    wait_until(lambda: [one["status"] for one in organism.mailbox("system")] == ["read"], what="read")


@pytest.mark.requirement("XP-06")
def test_an_answer_is_posted_once_though_its_acknowledgement_is_sent_twice_with_other_words(
    organism: Organism,
) -> None:
    organism.post(search(), head="<to>fast</to>")
    (message,) = organism.lease("fast")["messages"]
    answers = [{"kind": "found", "body": f"<found>{number}</found>"} for number in (1, 2)]
    assert organism.settle(message, answers[0])["verdict"] == "accepted"
    assert organism.settle(message, answers[0])["verdict"] == "duplicate"
    assert organism.settle(message, answers[1])["verdict"] == "rejected"
    wait_until(lambda: organism.mailbox("operator"), what="the answer")
    assert [one["body"] for one in organism.mailbox("operator")] == ["<found>1</found>"]


@pytest.mark.requirement("XP-07")
def test_what_another_door_calls_a_thread_mixes_no_two_conversations(
    organism: Organism, publisher: Publisher
) -> None:
    # Sender, message id and thread are what an agent over MQTT has chosen.
    for name, to in (("mo", "fast"), ("mina", "slow")):
        said = Message.model_validate(
            {
                "message_id": "1",
                "from": name,
                "to": to,
                "kind": "search",
                "body": search(name),
                "content_type": "application/xml",
                "thread": "main",
            }
        )
        publisher.append(said.record(door="mqtt", principal=name)).result(10)
    leased = [*organism.lease("fast")["messages"], *organism.lease("slow")["messages"]]
    assert [one["sender"] for one in leased] == ["mo", "mina"]
    assert len({one["thread"] for one in leased}) == 2 and "main" not in {one["thread"] for one in leased}
    for one in leased:
        history = organism.operator.post(
            "/api/hub/pump/history", json={"listener": one["listener"], "thread": one["thread"]}
        ).json()["messages"]
        assert [said["sender"] for said in history] == [one["sender"]]
        organism.settle(one, {"kind": "found", "body": f"<found>{one['sender']}</found>"})
    for name in ("mo", "mina"):
        wait_until(lambda name=name: organism.mailbox(name), what="the answer")
        assert [one["body"] for one in organism.mailbox(name)] == [f"<found>{name}</found>"]


@pytest.mark.requirement("XP-11")
def test_who_writes_to_a_listener_that_is_removed_at_that_moment_is_told(
    organism: Organism, publisher: Publisher
) -> None:
    organism.post('<order xmlns="urn:test:order"></order>')
    (order,) = organism.lease("boss")["messages"]
    # The mailbox is closed, and the gateway that addresses the answer does not know it yet.
    closing = MailboxClosing(to="fast", request_id="g1").record(ce_id="g1", door="reactor", principal="reactor")
    publisher.append(closing).result(10)
    organism.settle(order, {"kind": "search", "namespace": SEARCH, "body": search()})
    wait_until(lambda: organism.mailbox("boss", pending=True), what="the <huh>")
    (told,) = organism.mailbox("boss", pending=True)
    assert (told["sender"], told["kind"], told["thread"]) == ("system", "huh", order["thread"])


@pytest.mark.requirement("XP-08")
def test_what_is_given_back_by_a_pump_that_ends_was_no_attempt(organism: Organism) -> None:
    organism.post(search(), head="<to>fast</to>")
    for _ in range(4):
        (message,) = organism.lease("fast")["messages"]
        assert message["attempts"] == 1
        assert organism.settle(message, outcome="nack")["verdict"] == "accepted"


def test_a_listener_shares_its_name_and_so_its_mailbox_with_nobody(organism: Organism) -> None:
    body = {"principal": "fast", "role": "worker"}
    assert organism.operator.post("/api/hub/principals", json=body).json()["reason"] == "policy"
    body = {"agent_name": "fast", "public_key": new_key_pair()[1]}
    assert organism.operator.post("/api/hub/participants", json=body).json()["reason"] == "policy"


@pytest.mark.requirement("XP-15")
@pytest.mark.requirement("DL-22")
@pytest.mark.requirement("LM-01")
def test_a_document_has_priority_times_and_limits_as_other_messages(organism: Organism) -> None:
    to_fast = "<to>fast</to>"
    for bad in ({"priority": "urgent"}, {"expires_in_s": "0"}, {"expires_in_s": "1", "deliver_after_s": "1"}):
        assert organism.post(search(), head=to_fast, **bad).json()["reason"] == "malformed"
    organism.post(search("low"), head=to_fast, priority="low")
    organism.post(search("late"), head=to_fast, deliver_after_s="1.5", expires_in_s="300")
    organism.post(search("high"), head=to_fast, priority="high")
    organism.post(search("brief"), head=to_fast, expires_in_s="0.2")
    rows = {one["body"].partition("<query>")[2].partition("<")[0]: one for one in organism.mailbox("fast")}
    assert {name: one["status"] for name, one in rows.items() if name != "brief"} == {
        "low": "unread",
        "high": "unread",
        "late": "delayed",
    }
    assert rows["late"]["expires_at"] is not None
    wait_until(lambda: {one["status"] for one in organism.mailbox("fast", status="expired")}, 10, "it expires")
    got = [local(one["body"].encode())["query"] for one in organism.lease("fast")["messages"]]
    wait_until(lambda: not organism.mailbox("fast", status="delayed"), 10, "it is delivered")
    got += [local(one["body"].encode())["query"] for one in organism.lease("fast")["messages"]]
    assert got == ["high", "low", "late"]
    # The three are leased, so they count.
    organism.operator.post("/api/hub/limits/name/fast", json={"pending_most": 3})
    full = organism.post(search(), head=to_fast)
    assert (full.status_code, full.json()["reason"]) == (429, "mailbox_full") and "Retry-After" in full.headers
    token = add_principal(organism.operator, "ann", "worker")
    organism.operator.post("/api/hub/limits/name/ann", json={"messages_per_minute": 1})
    with organism.gateway.client(token) as ann:
        answers = [organism.post(search(), ann, "<to>slow</to>") for _ in range(2)]
        assert [one.status_code for one in answers] == [202, 429], answers[0].text
        assert answers[1].json()["reason"] == "rate_limited"
        assert organism.post(search(), ann, to_fast).json()["reason"] == "mailbox_full"
