"""Messages at the agent MCP door (AM-04, AM-05): whose they are, who gets them how often, what is in them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import httpx
import pytest

from connectors.log.publisher import Publisher
from schemas.streams.mailboxes.mailbox_bodies import MailboxLease
from schemas.streams.refused.refusal import REQUEST_REFUSED
from tests.broker_processes import wait_until
from tests.connectors.doors.mcp_tools.conftest import PARTICIPANTS, Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body, logged

pytestmark = pytest.mark.requirement("AM-04")

NewCaller = Callable[[str], SignedCaller]
CONTENTS = {
    "markup": "<script>alert('x')</script><!-- ]]> &amp; {{7*7}}",
    "control": "".join(map(chr, range(0x20))) + "\x7f\x80\x85\x9f",
    "terminal": "\x1b]0;title\x07\x1b[31mred",
    "bidi": "\u202eevil\u202c \u2066x\u2069 \u200f\ufeff",
    "line ends": "a\nb\r\nc\rd\u2028e\u2029f\x0bg\x0ch\u0085i",
    "beyond the plane": "\U0001f9ea" * 10 + "\U0010ffff",
    "event stream": "data: {}\n\nevent: endpoint\ndata: /elsewhere\n\n",
    "looks like JSON": '{"__proto__": 1, "a": [null]}',
    "blank": " ",
}


@pytest.fixture
def operator(shared_gateway: McpGateway) -> Iterator[httpx.Client]:
    """A client with the operator's token."""
    with shared_gateway.client() as client:
        yield client


@pytest.mark.requirement("DL-43")
@pytest.mark.parametrize("transport", ["http", "sse"])
def test_any_text_arrives_as_it_was_sent(
    shared_gateway: McpGateway, new_agent: Callable[[str], Agent], transport: str
) -> None:
    agent = new_agent("writes")

    async def talk() -> list[dict[str, Any]]:
        async with agent.client(shared_gateway, transport) as client:
            for content in CONTENTS.values():
                sent = {"targetAgentId": agent.name, "message": content}
                assert not (await client.call_tool("send_to_agent", sent)).is_error
            counted = await client.call_tool("count_messages", {})
            assert counted.structured_content == {"high": 0, "normal": 9, "low": 0, "total": 9}
            answer = await client.call_tool("get_my_messages", {})
            assert not answer.is_error, answer.content
            return list(answer.structured_content["messages"])

    assert [one["content"] for one in anyio.run(talk)] == list(CONTENTS.values())


def test_a_message_of_the_greatest_length_arrives_and_one_longer_does_not(new_caller: NewCaller) -> None:
    ann = new_caller("ann")
    for sign in ("x", "ж", "☃", "\U0001f9ea"):
        longest = sign * (1024 * 1024 // len(sign.encode()))
        ann.call("send_to_agent", targetAgentId=ann.name, message=longest)
        assert (
            ann.error("send_to_agent", targetAgentId=ann.name, message=longest + "xxxx")["reason"]
            == "too_large"
        )
        (found,) = ann.messages(unreadOnly=True)
        assert found["content"] == longest
        assert ann.call("mark_read", messageIds=[found["id"]])["marked"] == 1


def test_an_answer_holds_what_fits_and_says_how_much_more_there_is(new_caller: NewCaller) -> None:
    ann = new_caller("ann")
    for number in range(6):
        ann.call("send_to_agent", targetAgentId=ann.name, message=f"{number}" * 1024 * 1024)
    found = ann.call("get_my_messages")
    assert [one["content"][0] for one in found["messages"]] == ["0", "1", "2", "3"]
    assert (found["more"], found["statistics"]["total"]) == (2, 6)
    found = ann.call("get_my_messages", limit=1)
    assert (len(found["messages"]), found["more"]) == (1, 5)


def test_an_agent_reads_and_marks_its_own_messages_only(new_caller: NewCaller) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")
    sent = ann.call("send_to_agent", targetAgentId=bo.name, message="for bo alone")
    own = ann.call("send_to_agent", targetAgentId=ann.name, message="for me")
    assert [one["content"] for one in ann.messages()] == ["for me"]
    assert [one["content"] for one in bo.messages()] == ["for bo alone"]
    marked = ann.call("mark_read", messageIds=[sent["messageId"], own["messageId"]])
    assert marked == {"marked": 1, "unknown": [sent["messageId"]], "notMarked": []}
    assert [one["content"] for one in bo.messages(unreadOnly=True)] == ["for bo alone"]
    assert ann.call("mark_read", messageIds=[own["messageId"]])["marked"] == 0


@pytest.mark.requirement("HB-11")
def test_a_message_with_a_ttl_expires_and_a_repeated_call_is_the_same_message(new_caller: NewCaller) -> None:
    ann = new_caller("ann")
    kept = {"targetAgentId": ann.name, "message": "for an hour", "ttlSeconds": 3600, "idempotencyKey": "t1"}
    over = {"targetAgentId": ann.name, "message": "over", "ttlSeconds": 0.001, "idempotencyKey": "t2"}
    first = [ann.call("send_to_agent", **one) for one in (kept, over)]
    assert [ann.call("send_to_agent", **one) for one in (kept, over)] == first
    assert [one["content"] for one in ann.messages()] == ["for an hour"]
    with ThreadPoolExecutor(4) as pool:
        at_once = pool.map(lambda _: ann.call("send_to_agent", **{**kept, "idempotencyKey": "t3"}), range(4))
    assert len({one["messageId"] for one in at_once}) == 1
    del kept["ttlSeconds"]
    assert ann.error("send_to_agent", **kept)["reason"] == "seq_conflict"


@pytest.mark.requirement("DL-22")
def test_a_delayed_message_and_a_delayed_broadcast_come_after_their_time(new_caller: NewCaller) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")
    late = {"delaySeconds": 1.5, "ttlSeconds": 600, "priority": "high"}
    sent_at = time.time()
    ann.call("send_to_agent", targetAgentId=bo.name, message="one", **late)
    ann.call("broadcast_message", message="all", **late)
    ann.call("send_to_agent", targetAgentId=bo.name, message="at once")
    assert [one["content"] for one in bo.messages()] == ["at once"]
    wait_until(lambda: len(bo.messages()) == 3, 10, "the delayed messages are there")
    assert time.time() - sent_at >= 1.5
    assert [one["content"] for one in bo.messages()] == ["one", "all", "at once"]
    fault = ann.error("send_to_agent", targetAgentId=bo.name, message="x", delaySeconds=2, ttlSeconds=2)
    assert "would expire before it is delivered" in fault["message"]


@pytest.mark.requirement("LM-01")
@pytest.mark.requirement("LM-02")
@pytest.mark.requirement("LM-06")
def test_a_full_mailbox_and_a_rate_that_is_used_up_are_errors_of_the_tool(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")

    def limit(name: str, **limits: int) -> None:
        with shared_gateway.client() as operator:
            answer = operator.post(f"/api/hub/limits/name/{name}", json=limits)
            assert answer.status_code == 200, answer.text

    def refused(reason: str, tool: str, **arguments: Any) -> None:
        found = ann.tool(tool, **arguments)
        told = found["structuredContent"]
        assert (found["isError"], told["reason"]) == (True, reason), (tool, found)
        assert told["retryAfterSeconds"] >= 1, (tool, told)
        assert f"try again in {told['retryAfterSeconds']} s" in found["content"][0]["text"]

    limit(bo.name, pending_most=1)
    to_bo = {"targetAgentId": bo.name, "message": "x"}
    sent = ann.call("send_to_agent", **to_bo)["messageId"]
    refused("mailbox_full", "send_to_agent", **to_bo)
    refused("mailbox_full", "send_to_agent", **to_bo, inReplyTo=sent)
    refused("mailbox_full", "ask_agent", **to_bo, timeoutSeconds=1)
    ann.call("subscribe", topic=f"of-{ann.name}")
    limit(ann.name, messages_per_minute=1, subscriptions_most=1)
    to_ann = {"targetAgentId": ann.name, "message": "x"}
    ann.call("send_to_agent", **to_ann)
    refused("rate_limited", "send_to_agent", **to_ann)
    refused("rate_limited", "ask_agent", **to_ann, timeoutSeconds=1)
    refused("rate_limited", "broadcast_message", message="x")
    refused("rate_limited", "publish_message", topic=f"of-{ann.name}", message="x")
    refused("limit_reached", "subscribe", topic=f"other-{ann.name}")
    limit(ann.name)
    # The others get the broadcast, and the full mailbox does not.
    bo.call("subscribe", topic=f"of-{ann.name}")
    for more in ({}, {"TE": "trailers"}):  # directly, and by the careful path
        answer = ann.post(call_body("publish_message", topic=f"of-{ann.name}", message="x"), **more)
        published = answer.json()["result"]["structuredContent"]
        assert (published["recipientCount"], published["full"]) == (1, 1)
    broadcast = ann.call("broadcast_message", message="x")
    limit(bo.name)
    now = ann.call("broadcast_message", message="x")
    assert now["recipientCount"] == broadcast["recipientCount"] + 1
    assert now["full"] == broadcast["full"] - 1


@pytest.mark.requirement("HB-05")
def test_an_empty_list_of_ids_marks_none_and_succeeds(new_caller: NewCaller) -> None:
    ann = new_caller("ann")
    ann.call("send_to_agent", targetAgentId=ann.name, message="for me")
    assert ann.call("mark_read", messageIds=[]) == {"marked": 0, "unknown": [], "notMarked": []}
    assert [one["read"] for one in ann.messages()] == [False]


def test_what_cannot_be_marked_does_not_keep_others_from_being_marked(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    """A message that another door has leased, beside one that waits."""
    ann = new_caller("ann")
    first, second = (
        ann.call("send_to_agent", targetAgentId=ann.name, message=text)["messageId"] for text in ("a", "b")
    )
    lease = MailboxLease(to=ann.name, request_id="lease-1", lease_ms=600_000).record(
        door="file", principal="carrier"
    )
    with Publisher(shared_gateway.settings) as publisher:
        publisher.append(lease).result(20)
    # The mailbox's records are settled in order.
    ann.call("send_to_agent", targetAgentId=ann.name, message="c")
    marked = ann.call("mark_read", messageIds=[first, second])
    assert marked == {"marked": 1, "unknown": [], "notMarked": [first]}


@pytest.mark.requirement("AM-05")
def test_a_recipient_that_nobody_knows_is_refused_with_a_reason_and_stands_in_the_ledger(
    shared_gateway: McpGateway, new_caller: NewCaller, operator: httpx.Client
) -> None:
    ann, gone = new_caller("ann"), new_caller("gone")
    assert operator.post(f"{PARTICIPANTS}/{gone.name}/stop").status_code == 200
    for name in ("nobody-of-this-name", gone.name):
        found = ann.error("send_to_agent", targetAgentId=name, message="are you there?")
        assert found["reason"] == "unknown_recipient"

    def refused() -> list[tuple[str, str]]:
        bodies = [json.loads(one.value) for one in logged(shared_gateway.settings, REQUEST_REFUSED)]
        return [(one["reason"], one["route"]) for one in bodies if one["principal"] == ann.name]

    expected = [("unknown_recipient", "send_to_agent")] * 2
    wait_until(lambda: refused() == expected, what="the refusals in the log")


def test_the_same_call_again_has_its_effect_once(new_caller: NewCaller) -> None:
    ann, bo, cy = new_caller("ann"), new_caller("bo"), new_caller("cy")
    call = {"targetAgentId": bo.name, "message": "once", "idempotencyKey": "k1"}
    sent = [ann.call("send_to_agent", **call) for _ in range(3)]
    assert sent == [sent[0]] * 3
    assert [one["id"] for one in bo.messages()] == [sent[0]["messageId"]]
    for other in ({"targetAgentId": cy.name}, {"message": "twice"}, {"priority": "high"}):
        assert ann.error("send_to_agent", **(call | other))["reason"] == "seq_conflict"
    assert cy.messages() == []
    # Another agent's keys are its own.
    assert cy.call("send_to_agent", **call)["messageId"] != sent[0]["messageId"]
    assert len(bo.messages()) == 2
    statuses = [
        ann.tool("update_my_status", status=one, idempotencyKey="k2") for one in ("idle", "idle", "blocked")
    ]
    assert [one.get("isError", False) for one in statuses] == [False, False, True]


@pytest.mark.requirement("AM-05")
def test_a_broadcast_reaches_everybody_else_once_also_when_it_is_repeated(
    new_caller: NewCaller, operator: httpx.Client
) -> None:
    ann, bo, cy, gone = (new_caller(name) for name in ("ann", "bo", "cy", "gone"))
    assert operator.post(f"{PARTICIPANTS}/{gone.name}/stop").status_code == 200
    first = ann.call("broadcast_message", message="to all", idempotencyKey="b1")
    again = ann.call("broadcast_message", message="to all", idempotencyKey="b1")
    assert again == first
    agents = ann.call("discover_agents")["agents"]
    assert first["recipientCount"] == len(agents) - 1 + 1  # not the sender, but the operator
    for caller, count in ((ann, 0), (bo, 1), (cy, 1)):
        assert [one["content"] for one in caller.messages()] == ["to all"] * count
    # An agent that has joined since gets it when it is repeated, and no agent gets it twice.
    late = new_caller("late")
    assert ann.call("broadcast_message", message="to all", idempotencyKey="b1") == first | {
        "recipientCount": first["recipientCount"] + 1
    }
    for caller in (bo, cy, late):
        assert [one["content"] for one in caller.messages()] == ["to all"]
    assert (
        ann.error("broadcast_message", message="other words", idempotencyKey="b1")["reason"] == "seq_conflict"
    )
    shown = operator.get("/api/hub/mailboxes/default/operator").json()["messages"]
    assert [one["body"] for one in shown].count("to all") == 1


@pytest.mark.requirement("AM-06")
def test_discovery_shows_who_takes_part_by_status_and_capability(
    new_caller: NewCaller, operator: httpx.Client
) -> None:
    ann, bo, gone = (new_caller(name) for name in ("ann", "bo", "gone"))
    assert operator.post(f"{PARTICIPANTS}/{gone.name}/stop").status_code == 200
    bo.call("update_my_status", status="blocked", capabilities=["weave"])

    def names(**wanted: Any) -> set[str]:
        return {one["id"] for one in ann.call("discover_agents", **wanted)["agents"]}

    assert {ann.name, bo.name} <= names()
    assert gone.name not in names()
    assert gone.name in names(status="stopped")
    assert bo.name in names(status="blocked")
    assert names(capability="weave") == {bo.name}
    first, last = min(ann.name, bo.name), max(ann.name, bo.name)
    assert last in names(after=first) and not {first, last} & names(after=last)
    assert ann.name not in names(status="blocked")
