"""The MCP tools that wait, lease and ask, by the official client over both transports (DL-09)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import (
    WAIT_S,
    at_once,
    called,
    ids,
    known_at,
    sent,
    waiting,
)

pytestmark = [pytest.mark.requirement("DL-09"), pytest.mark.timeout(120)]

NewAgent = Callable[[str], Agent]
MESSAGES = "/api/hub/messages"
both_transports = pytest.mark.parametrize("transport", ["http", "sse"])


@both_transports
def test_a_wait_ends_at_once_with_a_message_and_empty_when_its_time_is_over(
    shared_gateway: McpGateway, new_agent: NewAgent, transport: str
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")

    async def talk() -> None:
        async with ann.client(shared_gateway, transport) as a, bo.client(shared_gateway, transport) as b:
            began = time.monotonic()
            empty = await called(a, "wait_for_messages", timeoutSeconds=1)
            assert (empty["messages"], empty["more"]) == ([], 0)
            assert 1 <= time.monotonic() - began < 5

            async def send() -> tuple[str, float]:
                await waiting(shared_gateway)
                return await sent(b, ann.name, "wake up", thread="t1", inReplyTo="m1"), time.monotonic()

            wait = partial(called, a, "wait_for_messages", timeoutSeconds=WAIT_S)
            found, (message_id, at) = await at_once(wait, send)
            assert time.monotonic() - at < 2
            (message,) = found["messages"]
            expected = {"id": message_id, "from": bo.name, "content": "wake up", "read": False}
            assert {**expected, "thread": "t1", "inReplyTo": "m1"}.items() <= message.items()
            # It is still there, so the next wait does not wait.
            assert (await called(a, "wait_for_messages", timeoutSeconds=WAIT_S))["messages"] == [message]
            later = message["timestamp"] + 1
            assert ids(await called(a, "wait_for_messages", timeoutSeconds=0, since=later)) == []
            await called(a, "mark_read", messageIds=[message_id])
            assert ids(await called(a, "wait_for_messages", timeoutSeconds=0)) == []

    anyio.run(talk)


@both_transports
def test_a_leased_message_is_acknowledged_given_back_or_extended(
    shared_gateway: McpGateway, new_agent: NewAgent, transport: str
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")

    async def talk() -> None:
        async with ann.client(shared_gateway, transport) as a, bo.client(shared_gateway, transport) as b:
            assert await called(a, "lease_messages") == {"messages": [], "leaseId": None, "left": 0}
            first, second, third = [await sent(b, ann.name, text) for text in ("one", "two", "three")]
            before = time.time()
            lease = await called(a, "lease_messages", limit=2, leaseSeconds=60)
            assert ids(lease) == [first, second]
            for message in lease["messages"]:
                assert message["attempt"] == 1
                assert before + 59 < message["deadline"] / 1000 < time.time() + 61
            # A message that is leased does not end a wait, although it is unread.
            assert ids(await called(a, "wait_for_messages", timeoutSeconds=0)) == [third]
            lease_id = lease["leaseId"]
            acked = await called(a, "ack_messages", leaseId=lease_id, messageIds=[first, "m-none", first])
            (refused,) = acked["refused"]
            assert (acked["done"], refused["id"], refused["reason"]) == ([first], "m-none", "unknown_stream")
            again = await called(a, "ack_messages", leaseId=lease_id, messageIds=[first])
            assert again == {"done": [first], "refused": []}
            nack = partial(called, a, "nack_message", leaseId=lease_id, messageId=second, reason="no disk")
            assert [await nack(), await nack()] == [{"done": [second], "refused": []}] * 2
            lease = await called(a, "lease_messages", leaseSeconds=1)
            assert [(one["id"], one["attempt"]) for one in lease["messages"]] == [(second, 2), (third, 1)]
            more = {"leaseId": lease["leaseId"], "messageIds": [second], "leaseSeconds": 60}
            assert (await called(a, "extend_lease", **more))["done"] == [second]
            # The lease of the other message runs out, and the next consumer gets it.
            began = time.monotonic()
            late = await called(a, "lease_messages", timeoutSeconds=WAIT_S)
            assert time.monotonic() - began < 1 + 2
            assert [(one["id"], one["attempt"]) for one in late["messages"]] == [(third, 2)]
            ended = {"leaseId": lease["leaseId"], "messageIds": [second, third]}
            acked = await called(a, "ack_messages", **ended)
            extended = await called(a, "extend_lease", **ended)
            lost = await called(a, "nack_message", leaseId=lease["leaseId"], messageId=third)
            assert (acked["done"], extended["done"], lost["done"]) == ([second], [], [])
            for refused in (acked["refused"][0], extended["refused"][1], lost["refused"][0]):
                assert (refused["id"], refused["reason"]) == (third, "illegal_transition")
                assert refused["message"]

    anyio.run(talk)


@pytest.mark.requirement("DL-05")
def test_a_message_is_dead_after_its_last_attempt_with_the_last_reason(
    shared_gateway: McpGateway, new_agent: NewAgent
) -> None:
    ann = new_agent("ann")

    async def talk() -> int:
        async with ann.client(shared_gateway) as a:
            message_id = await sent(a, ann.name, "hard")
            for attempt in range(1, 1000):
                lease = await called(a, "lease_messages", timeoutSeconds=2 if attempt == 1 else 0)
                if not lease["messages"]:
                    return attempt - 1
                assert [(one["id"], one["attempt"]) for one in lease["messages"]] == [(message_id, attempt)]
                given = {"leaseId": lease["leaseId"], "messageId": message_id, "reason": f"no {attempt}"}
                assert (await called(a, "nack_message", **given))["done"] == [message_id]
        return 0

    most = shared_gateway.settings.gateway.max_attempts
    assert anyio.run(talk) == most
    with shared_gateway.client() as operator:
        (shown,) = operator.get(f"/api/hub/mailboxes/default/{ann.name}").json()["messages"]
    assert (shown["status"], shown["attempts"], shown["last_reason"]) == ("dead", most, f"no {most}")


@pytest.mark.requirement("DL-04")
def test_consumers_of_one_mailbox_at_mcp_and_http_each_get_different_messages(
    shared_gateway: McpGateway, other_gateway: McpGateway, new_agent: NewAgent
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")
    known_at(other_gateway, ann)
    with shared_gateway.client() as operator:
        token = add_principal(operator, ann.name, "worker")
    got: dict[str, list[str]] = {}
    posted: list[str] = []
    done = anyio.Event()

    async def by_mcp(gateway: McpGateway, transport: str) -> None:
        found = got.setdefault(f"{gateway.mcp_url} {transport}", [])
        async with ann.client(gateway, transport) as client:
            while not done.is_set():
                lease = await called(client, "lease_messages", limit=2, timeoutSeconds=1)
                if lease["messages"]:
                    ack = {"leaseId": lease["leaseId"], "messageIds": ids(lease)}
                    found += (await called(client, "ack_messages", **ack))["done"]

    async def by_http() -> None:
        found = got.setdefault("http", [])
        client = httpx.AsyncClient(
            base_url=shared_gateway.url, headers={"Authorization": f"Bearer {token}"}, trust_env=False
        )
        async with client:
            while not done.is_set():
                answer = await client.get(MESSAGES, params={"lease": 60, "limit": 2, "wait": 1}, timeout=20)
                if answer.json()["messages"]:
                    body = {"lease_id": answer.json()["lease_id"], "message_ids": ids(answer.json())}
                    found += (await client.post(f"{MESSAGES}/ack", json=body)).json()["done"]

    async def send() -> None:
        async with bo.client(shared_gateway) as client:
            for number in range(60):
                posted.append(await sent(client, ann.name, f"{number}"))
        with anyio.move_on_after(WAIT_S):
            while sum(map(len, got.values())) < len(posted):
                await anyio.sleep(0.05)
        done.set()

    async def work() -> None:
        consumers = [
            partial(by_mcp, gateway, transport)
            for gateway in (shared_gateway, other_gateway)
            for transport in ("http", "sse")
        ]
        await at_once(*consumers, by_http, send)

    anyio.run(work)
    assert sorted(one for found in got.values() for one in found) == sorted(posted)
    assert got["http"] and sum(bool(found) for found in got.values()) > 2


@pytest.mark.requirement("DL-06")
@pytest.mark.requirement("DL-07")
@both_transports
def test_an_asker_gets_the_reply_once_and_nothing_else(
    shared_gateway: McpGateway, new_agent: NewAgent, transport: str
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")
    question = {"targetAgentId": bo.name, "message": "6 * 7?", "thread": "sums", "priority": "high"}

    async def talk() -> None:
        async with ann.client(shared_gateway, transport) as a, bo.client(shared_gateway, transport) as b:

            async def reply() -> tuple[str, dict[str, Any]]:
                (asked,) = (await called(b, "lease_messages", timeoutSeconds=WAIT_S))["messages"]
                await sent(b, ann.name, "hello")
                await sent(b, ann.name, "to another", inReplyTo="m-1")
                fields = {"inReplyTo": asked["id"], "thread": asked["thread"]}
                return await sent(b, ann.name, "42", **fields), asked

            ask = partial(called, a, "ask_agent", **question, timeoutSeconds=WAIT_S, idempotencyKey="k1")
            answer, (reply_id, asked) = await at_once(ask, reply)
            assert (asked["content"], asked["priority"], asked["thread"]) == ("6 * 7?", "high", "sums")
            assert answer["messageId"] == asked["id"]
            expected = {"id": reply_id, "from": bo.name, "content": "42", "inReplyTo": asked["id"]}
            assert {**expected, "thread": "sums"}.items() <= answer["reply"].items()
            # The same call gets the same reply, and the mailbox hands it out to nobody.
            assert await ask() == answer
            left = (await called(a, "lease_messages"))["messages"]
            assert [one["content"] for one in left] == ["hello", "to another"]
            assert [one["id"] for one in (await called(b, "get_my_messages"))["messages"]] == [asked["id"]]

    anyio.run(talk)


@pytest.mark.requirement("DL-07")
@both_transports
def test_without_a_reply_in_time_the_answer_has_none_and_the_reply_is_in_the_mailbox_later(
    shared_gateway: McpGateway, new_agent: NewAgent, transport: str
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")

    async def talk() -> None:
        async with ann.client(shared_gateway, transport) as a, bo.client(shared_gateway, transport) as b:
            question = {"targetAgentId": bo.name, "message": "?", "timeoutSeconds": 0.5}
            answer = await called(a, "ask_agent", **question)
            assert (answer["reply"], answer["timestamp"] > 0) == (None, True)
            reply_id = await sent(b, ann.name, "at last", inReplyTo=answer["messageId"])
            (found,) = (await called(a, "wait_for_messages"))["messages"]
            assert (found["id"], found["inReplyTo"]) == (reply_id, answer["messageId"])

    anyio.run(talk)


def test_a_repeated_call_gets_the_same_result_also_at_another_gateway(
    shared_gateway: McpGateway, other_gateway: McpGateway, new_agent: NewAgent
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")
    known_at(other_gateway, ann, bo)

    async def talk() -> None:
        async with ann.client(shared_gateway) as here, ann.client(other_gateway, "sse") as there:

            async def both(tool: str, **arguments: Any) -> dict[str, Any]:
                first = await called(here, tool, **arguments)
                assert await called(there, tool, **arguments) == first, tool
                assert await called(here, tool, **arguments) == first, tool
                return first

            one = await sent(here, ann.name, "one")
            lease = await both("lease_messages", idempotencyKey="l1", leaseSeconds=60)
            assert ids(lease) == [one]
            two = await sent(here, ann.name, "two")
            assert ids(await both("lease_messages", idempotencyKey="l1", leaseSeconds=60)) == [one]
            other = await there.call_tool("lease_messages", {"idempotencyKey": "l1", "leaseSeconds": 61})
            assert other.is_error and other.structured_content["reason"] == "seq_conflict"
            leased = {"leaseId": lease["leaseId"], "messageIds": [one]}
            await both("extend_lease", **leased, leaseSeconds=600, idempotencyKey="x1")
            (shown,) = (await called(there, "lease_messages", idempotencyKey="l1"))["messages"]
            await both("extend_lease", **leased, leaseSeconds=600, idempotencyKey="x1")
            assert (await called(here, "lease_messages", idempotencyKey="l1"))["messages"] == [shown]
            assert (await both("ack_messages", **leased))["done"] == [one]
            # Acknowledged messages are final, so the lease has none any more.
            assert ids(await both("lease_messages", idempotencyKey="l1")) == []
            lease = await both("lease_messages", idempotencyKey="l2")
            assert ids(lease) == [two]
            given = {"leaseId": lease["leaseId"], "messageId": two, "reason": "no"}
            assert (await both("nack_message", **given))["done"] == [two]
            again = await both("lease_messages", idempotencyKey="l3")
            assert [message["attempt"] for message in again["messages"]] == [2]
            question = {"targetAgentId": bo.name, "message": "?", "idempotencyKey": "q1"}
            asked = await both("ask_agent", **question, timeoutSeconds=0)
            async with bo.client(other_gateway) as b:
                assert ids(await called(b, "get_my_messages")) == [asked["messageId"]]

                async def reply() -> str:
                    await waiting(other_gateway)
                    return await sent(b, ann.name, "yes", inReplyTo=asked["messageId"])

                wait = partial(called, there, "ask_agent", **question, timeoutSeconds=WAIT_S)
                answer, reply_id = await at_once(wait, reply)
            assert answer["reply"]["id"] == reply_id
            assert await both("ask_agent", **question, timeoutSeconds=WAIT_S) == answer

    anyio.run(talk)
