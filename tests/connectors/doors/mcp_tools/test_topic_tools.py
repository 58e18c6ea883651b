"""The MCP tools of topics (DL-24): over a log in memory, and by the official client on a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from connectors.doors.mcp_tools.agents.tool_arguments import (
    ListTopics,
    PublishMessage,
    Subscribe,
    Unsubscribe,
    WaitForMessages,
)
from connectors.hub.serving.answers import ApiError
from schemas.effects.topic_effects import delivery_of
from schemas.streams.topic.topic_registry import TopicMessageRow
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import called
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller
from tests.schemas.hub_records import public_key
from tests.schemas.stream_records import as_read

pytestmark = pytest.mark.requirement("DL-24")


def hub_of(*agents: str) -> FoldedHub:
    """A hub in memory in which these agents take part."""
    hub = FoldedHub()
    for agent in agents:
        hub.join(agent, public_key())
    return hub


def run(call: Any) -> dict[str, Any]:
    """Return the answer of a tool."""
    return dict(asyncio.run(call))


def publishing(**changed: Any) -> PublishMessage:
    """The arguments of a message to the topic."""
    return PublishMessage.model_validate({"topic": "news", "message": "soup", **changed})


def refused(call: Any) -> tuple[int, str]:
    """Status and reason of a tool's refusal."""
    with pytest.raises(ApiError) as found:
        asyncio.run(call)
    return found.value.status_code, found.value.reason


def test_an_agent_subscribes_and_leaves() -> None:
    tools = hub_of("ann").tools
    assert run(tools.list_topics("ann", ListTopics())) == {"topics": [], "total": 0}
    for _ in range(2):
        answer = run(tools.subscribe("ann", Subscribe(topic="news")))
        assert answer == {"topic": "news", "subscribed": True}
    (shown,) = run(tools.list_topics("ann", ListTopics()))["topics"]
    assert shown == {"topic": "news", "subscribers": 1, "subscribed": True, "lastPublishedAt": None}
    (other,) = run(tools.list_topics("bo", ListTopics()))["topics"]
    assert not other["subscribed"]
    for _ in range(2):
        answer = run(tools.unsubscribe("ann", Unsubscribe(topic="news")))
        assert answer == {"topic": "news", "subscribed": False}
    assert run(tools.list_topics("ann", ListTopics()))["topics"][0]["subscribers"] == 0


def test_the_list_of_topics_has_pages() -> None:
    tools = hub_of("ann").tools
    for topic in ("b", "c", "a", "d"):
        run(tools.subscribe("ann", Subscribe(topic=topic)))
    first = run(tools.list_topics("ann", ListTopics(limit=3)))
    assert ([one["topic"] for one in first["topics"]], first["total"]) == (["a", "b", "c"], 4)
    rest = run(tools.list_topics("ann", ListTopics(after="c")))
    assert [one["topic"] for one in rest["topics"]] == ["d"]


def test_a_message_is_published_once_per_key_and_topic() -> None:
    hub = hub_of("ann", "bo")
    tools = hub.tools
    for agent, topic in (("ann", "news"), ("bo", "news"), ("bo", "sports")):
        run(tools.subscribe(agent, Subscribe(topic=topic)))
    asked = publishing(priority="high", ttlSeconds=60, idempotencyKey="k")
    first, again = run(tools.publish_message("ann", asked)), run(tools.publish_message("ann", asked))
    assert first == again
    assert first["recipientCount"] == 2
    other = asked.model_copy(update={"payload": "salad"})
    assert refused(tools.publish_message("ann", other)) == (409, "seq_conflict")
    sports = run(tools.publish_message("ann", asked.model_copy(update={"topic": "sports"})))
    assert sports["messageId"] != first["messageId"]
    row = hub.get(TopicMessageRow, f"news/{first['messageId']}")
    assert row is not None and row.recipients == ["ann", "bo"]


def test_the_copy_of_a_message_shows_its_topic() -> None:
    hub = hub_of("ann", "bo")
    added: list[OutgoingRecord] = []
    add = hub.add
    hub.add = lambda record: added.append(record) or add(record)  # type: ignore[method-assign,func-returns-value]
    run(hub.tools.subscribe("bo", Subscribe(topic="news")))
    run(hub.tools.publish_message("ann", publishing(thread="t")))
    found = delivery_of(as_read(added[-1], len(added) + 1, hub.now_us), hub.get)
    assert found is not None
    for copy in found.copies():
        assert add(copy).verdict == "accepted"
    now = WaitForMessages.model_validate({"timeoutSeconds": 0})
    (message,) = run(hub.tools.wait_for_messages("bo", now))["messages"]
    shown = (message["from"], message["content"], message["topic"], message["thread"])
    assert shown == ("ann", "soup", "news", "t")


def test_an_agent_without_a_mailbox_cannot_subscribe() -> None:
    hub = hub_of("ann")
    assert refused(hub.tools.subscribe("gone", Subscribe(topic="news"))) == (404, "unknown_recipient")
    assert [one[:1] + one[2:] for one in hub.refused] == [("unknown_recipient", "gone", "subscribe")]


@pytest.mark.requirement("LM-04")
def test_a_mailbox_is_subscribed_to_a_bounded_number_of_topics() -> None:
    hub = hub_of("ann", "bo")
    hub.limit("ann", subscriptions_most=2)
    tools = hub.tools
    for topic in ("a", "b"):
        run(tools.subscribe("ann", Subscribe(topic=topic)))
    assert refused(tools.subscribe("ann", Subscribe(topic="c"))) == (429, "limit_reached")
    assert [one[0] for one in hub.refused] == ["limit_reached"]
    assert run(tools.subscribe("ann", Subscribe(topic="b")))["subscribed"], "it is subscribed to this one"
    assert run(tools.subscribe("bo", Subscribe(topic="c")))["subscribed"]
    run(tools.unsubscribe("ann", Unsubscribe(topic="a")))
    assert run(tools.subscribe("ann", Subscribe(topic="c")))["subscribed"]


@pytest.mark.kafka
@pytest.mark.parametrize("transport", ["http", "sse"])
def test_agents_publish_and_read_by_the_official_client(
    shared_gateway: McpGateway, new_agent: Callable[[str], Agent], transport: str
) -> None:
    ann, bo, topic = new_agent("ann"), new_agent("bo"), f"news-by-{transport}"

    async def talk() -> None:
        async with ann.client(shared_gateway, transport) as a, bo.client(shared_gateway, transport) as b:
            assert (await called(b, "subscribe", topic=topic))["subscribed"]
            sent = await called(a, "publish_message", topic=topic, message="soup", priority="high")
            assert sent["recipientCount"] == 1
            (message,) = (await called(b, "wait_for_messages", timeoutSeconds=20))["messages"]
            assert (message["from"], message["topic"], message["content"]) == (ann.name, topic, "soup")
            assert message["priority"] == "high"
            await called(b, "mark_read", messageIds=[message["id"]])
            assert not (await called(b, "unsubscribe", topic=topic))["subscribed"]
            assert (await called(a, "publish_message", topic=topic, message="salad"))["recipientCount"] == 0
            listed = (await called(a, "list_topics", after=f"{topic[:-1]}"))["topics"]
            (shown,) = [one for one in listed if one["topic"] == topic]
            assert (shown["subscribers"], shown["subscribed"]) == (0, False)
            assert shown["lastPublishedAt"] >= message["timestamp"] - 5000
            assert (await called(b, "get_my_messages", unreadOnly=True))["messages"] == []

    anyio.run(talk)


@pytest.mark.kafka
@pytest.mark.requirement("AM-06")
def test_a_stopped_agent_is_no_subscriber(
    shared_gateway: McpGateway, new_caller: Callable[[str], SignedCaller]
) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")
    for one in (ann, bo):
        one.call("subscribe", topic="of-the-stopped")
    with shared_gateway.client() as operator:
        assert operator.post(f"/api/hub/participants/{ann.name}/stop", json={}).is_success

        def subscribers() -> list[str]:
            shown = operator.get("/api/hub/topics/of-the-stopped").json()["subscriptions"]
            return [one["subscriber"] for one in shown]

        wait_until(lambda: subscribers() == [bo.name], 20, "the subscription has ended")
