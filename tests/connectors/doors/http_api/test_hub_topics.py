"""Topics at two gateways (DL-24): each message once to each subscriber, also if a gateway is killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.http_api.hub_post_routes import fresh
from tests.connectors.doors.http_api.hub_stack import MESSAGES, HubStack, post, said

pytestmark = [pytest.mark.requirement("DL-24"), pytest.mark.kafka]

TOPICS, MAILBOXES = "/api/hub/topics", "/api/hub/mailboxes/default"


def reader(hub: HubStack) -> tuple[str, httpx.Client, httpx.Client]:
    """A new principal with a mailbox: its name, and a client of it at each gateway."""
    name, token = hub.principal("worker")
    return name, hub.client(token), hub.client(token, 1)


def subscribe(client: httpx.Client, topic: str, name: str | None = None, how: str = "subscribe") -> Any:
    """Change a subscription; the answer."""
    body = {} if name is None else {"subscriber": name}
    answer = client.post(f"{TOPICS}/{topic}/{how}", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def publish(client: httpx.Client, topic: str, payload: Any = None, key: str | None = None, **more: Any) -> Any:
    """Publish a message; the answer."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"{TOPICS}/{topic}", json={"type": "note", "payload": payload, **more}, headers=headers)


def published(client: httpx.Client, topic: str, payload: Any = None, **more: Any) -> dict[str, Any]:
    """Publish a message that is taken; the body of the answer."""
    answer = publish(client, topic, payload, **more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def drained(client: httpx.Client, count: int = 1) -> list[dict[str, Any]]:
    """Take messages until so many came."""
    found: list[dict[str, Any]] = []
    wait_until(lambda: _take(client, found) >= count, 20, f"{count} messages")
    return found


def _take(client: httpx.Client, found: list[dict[str, Any]]) -> int:
    found += client.get(MESSAGES, params={"wait": 1}).json()["messages"]
    return len(found)


def is_delivered(client: httpx.Client, topic: str, names: list[str], count: int) -> bool:
    """Return whether each of these mailboxes has so many messages of the topic."""
    return all(len(copies(client, name, topic)) >= count for name in names)


def copies(client: httpx.Client, name: str, topic: str) -> list[str]:
    """The ids of a topic's messages in a mailbox, whatever their state."""
    rows = client.get(f"{MAILBOXES}/{name}", params={"limit": 1000}).json()["messages"]
    return [row["broadcast_id"] for row in rows if row["topic"] == topic]


def test_each_subscriber_gets_a_message_once_at_either_gateway(hub: HubStack) -> None:
    topic, (ann, here, _), (bo, _, there) = fresh("topic"), reader(hub), reader(hub)
    assert subscribe(here, topic).json() == {"topic": topic, "subscriber": ann, "status": "subscribed"}
    subscribe(there, topic)
    sent = published(hub.operator, topic, {"n": 1}, priority="high", thread="t1")
    assert sent == {"message_id": sent["message_id"], "topic": topic, "recipients": 2, "full": 0}
    for client, name in ((here, ann), (there, bo)):
        (message,) = drained(client)
        assert message.pop("timestamp").endswith("Z")
        assert message.pop("id") != sent["message_id"]
        expected = {"sender": "operator", "recipient": name, "type": "note", "payload": {"n": 1}}
        assert message == {**expected, "thread": "t1", "topic": topic}
    assert copies(hub.operator, ann, topic) == copies(hub.other, bo, topic) == [sent["message_id"]]
    # The sender may be subscribed, too.
    subscribe(hub.operator, topic)
    assert published(hub.operator, topic)["recipients"] == 3


def test_who_has_left_gets_nothing_more_and_who_comes_gets_nothing_of_before(hub: HubStack) -> None:
    topic, (ann, here, _), (bo, _, there) = fresh("topic"), reader(hub), reader(hub)
    subscribe(here, topic)
    first = published(hub.other, topic)
    subscribe(there, topic)
    second = published(hub.operator, topic)
    assert subscribe(here, topic, how="unsubscribe").json()["status"] == "unsubscribed"
    third = published(hub.other, topic)
    assert [one["recipients"] for one in (first, second, third)] == [1, 2, 1]
    wait_until(lambda: len(copies(hub.operator, bo, topic)) == 2, 20, "both messages")
    assert copies(hub.operator, bo, topic) == [second["message_id"], third["message_id"]]
    assert copies(hub.operator, ann, topic) == [first["message_id"], second["message_id"]]


@pytest.mark.requirement("HH-12")
def test_a_key_publishes_once_to_a_topic_at_either_gateway(hub: HubStack) -> None:
    topic, (name, _, _), key = fresh("topic"), reader(hub), fresh("key")
    subscribe(hub.operator, topic, name)
    first, again = publish(hub.operator, topic, 1, key), publish(hub.other, topic, 1, key)
    assert first.json() == again.json()
    assert [one.headers["Trunkline-Verdict"] for one in (first, again)] == ["accepted", "duplicate"]
    assert said(publish(hub.other, topic, 2, key)) == (409, "seq_conflict")
    wait_until(lambda: copies(hub.operator, name, topic) != [], 20, "the message")
    published(hub.operator, topic, "the last one")
    wait_until(lambda: len(copies(hub.operator, name, topic)) == 2, 20, "the last message")
    # The key counts for one topic.
    other = fresh("topic")
    subscribe(hub.operator, other, name)
    assert publish(hub.operator, other, 1, key).json()["message_id"] != first.json()["message_id"]


def test_a_message_may_wait_and_expire(hub: HubStack) -> None:
    topic, (name, here, _) = fresh("topic"), reader(hub)
    subscribe(here, topic)
    published(hub.operator, topic, "late", deliver_after_s=1.5)
    published(hub.operator, topic, "short", expires_in_s=0.001, priority="high")
    assert [one["payload"] for one in drained(here)] == ["late"]
    states = {row["status"] for row in hub.operator.get(f"{MAILBOXES}/{name}").json()["messages"]}
    assert states == {"expired", "claimed"}
    early = publish(hub.operator, topic, expires_in_s=1, deliver_after_s=2)
    assert said(early) == (400, "malformed")


def test_a_topic_exists_from_its_first_subscription_on(hub: HubStack) -> None:
    topic = fresh("topic")
    assert said(publish(hub.operator, topic)) == (404, "unknown_stream")
    assert said(hub.operator.post(f"{TOPICS}/{topic}/unsubscribe")) == (404, "unknown_stream")
    assert said(hub.operator.get(f"{TOPICS}/{topic}")) == (404, "not_found")
    for client in (hub.operator, hub.other):
        assert subscribe(client, topic).json()["status"] == "subscribed"
    assert subscribe(hub.other, topic, how="unsubscribe").headers["Trunkline-Verdict"] == "accepted"
    assert subscribe(hub.other, topic, how="unsubscribe").headers["Trunkline-Verdict"] == "duplicate"
    assert published(hub.other, topic)["recipients"] == 0


def test_topics_are_listed_and_shown_by_name(hub: HubStack) -> None:
    topics = sorted(fresh("listed") for _ in range(3))
    (ann, here, _), (bo, _, _) = reader(hub), reader(hub)
    for topic in topics:
        subscribe(here, topic)
    subscribe(hub.operator, topics[1], bo)
    sent = published(hub.operator, topics[1])
    before = f"{topics[0][:-1]}"
    listed = here.get(TOPICS, params={"after": before, "limit": 2}).json()
    assert [one["name"] for one in listed["topics"]] == topics[:2]
    assert listed["total"] >= 3
    shown = here.get(f"{TOPICS}/{topics[1]}").json()
    assert {**listed["topics"][1], "subscriptions": shown["subscriptions"]} == shown
    assert (shown["subscribers"], shown["subscribed"], shown["publications"]) == (2, True, 1)
    assert (shown["last_message_id"], shown["last_published_at"][-1]) == (sent["message_id"], "Z")
    assert not hub.operator.get(f"{TOPICS}/{topics[1]}").json()["subscribed"]
    by = {one["subscriber"]: one["subscribed_by"] for one in shown["subscriptions"]}
    assert by == {ann: f"http/{ann}", bo: "http/operator"}
    rest = here.get(f"{TOPICS}/{topics[1]}", params={"after": min(ann, bo), "limit": 1}).json()
    assert [one["subscriber"] for one in rest["subscriptions"]] == [max(ann, bo)]


@pytest.mark.requirement("HO-20")
def test_the_agent_of_a_task_publishes_if_its_token_may_send(hub: HubStack) -> None:
    topic = fresh("topic")
    agent, quiet = hub.submit("idle"), hub.submit("quiet")
    subscribe(hub.client(agent.token), topic)
    assert published(hub.client(agent.token), topic)["recipients"] == 1
    # It may subscribe, because it may read its mailbox.
    subscribe(hub.client(quiet.token), topic)
    assert said(publish(hub.client(quiet.token), topic)) == (403, "policy")


def test_a_revoked_principal_is_no_subscriber(hub: HubStack) -> None:
    topic, (name, here, _), (other, _, _) = fresh("topic"), reader(hub), reader(hub)
    subscribe(here, topic)
    subscribe(hub.operator, topic, other)
    assert hub.operator.post(f"/api/hub/principals/{name}/revoke", json={}).is_success

    def subscribers() -> list[str]:
        return [one["subscriber"] for one in hub.other.get(f"{TOPICS}/{topic}").json()["subscriptions"]]

    wait_until(lambda: subscribers() == [other], 20, "the end of the subscription")


def test_a_gateway_that_is_killed_while_messages_are_published_loses_and_doubles_nothing(hub: HubStack) -> None:
    topic, names = fresh("topic"), [fresh("many") for _ in range(40)]
    for name in names:
        add_principal(hub.operator, name, "worker")
        subscribe(hub.operator, topic, name)
    extra = hub.add_gateway()
    with extra.client() as client, ThreadPoolExecutor(1) as pool:
        ids = [published(client, topic, number)["message_id"] for number in range(5)]
        asked = pool.submit(
            lambda: [published(hub.operator, topic, number)["message_id"] for number in range(10)]
        )
        extra.program.kill()
        ids += asked.result(60)
    hub.gateways.remove(extra)
    wait_until(lambda: is_delivered(hub.operator, topic, names, len(ids)), 60, "all copies")
    for client in (hub.operator, hub.other):
        for name in names[:10]:
            assert sorted(copies(client, name, topic)) == sorted(ids)


def test_a_message_that_is_sent_has_no_topic(hub: HubStack) -> None:
    name, here, _ = reader(hub)
    post(hub.operator, name, 1)
    (message,) = drained(here)
    assert "topic" not in message
