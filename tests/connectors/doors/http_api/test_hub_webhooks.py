"""Webhooks at two gateways: set over HTTP, called once for each message, called again after a kill (WH-01)."""

from __future__ import annotations

import itertools
import json

import pytest

from schemas.settings.settings import WebhookSettings
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import HubStack, hub_settings, post, said
from tests.connectors.hub.webhooks.receiver import Answer, receiving
from tests.connectors.hub.webhooks.standard_webhooks import verify

WEBHOOKS, TOPICS, MAILBOXES = "/api/hub/webhooks", "/api/hub/topics", "/api/hub/mailboxes"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def hub(kafka_broker, tmp_path_factory):
    """Two gateways that may call this machine."""
    folder = tmp_path_factory.mktemp("hub")
    webhooks = WebhookSettings(
        allow_networks="127.0.0.0/8", allow_http=True, timeout_s=4, retry_first_s=0.2, webhooks_most=50
    )
    settings = hub_settings(kafka_broker, folder).model_copy(update={"webhooks": webhooks})
    stack = HubStack(settings, folder)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


def member(hub, role="worker"):
    """A new principal: its name, and a client of it at each gateway."""
    name, token = hub.principal(role)
    return name, hub.client(token), hub.client(token, 1)


def set_up(client, name, url, key=None, **more):
    """The answer to a request that sets a webhook."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"{WEBHOOKS}/{name}", json={"url": url, **more}, headers=headers)


def shown(client, name):
    """A webhook, as a gateway shows it."""
    answer = client.get(f"{WEBHOOKS}/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def statuses(hub, name):
    """The status of each message of a mailbox."""
    found = hub.operator.get(f"{MAILBOXES}/default/{name}", params={"limit": 1000}).json()["messages"]
    return {one["message_id"]: one["status"] for one in found}


@pytest.mark.requirement("WH-01")
@pytest.mark.requirement("WH-02")
@pytest.mark.requirement("WH-04")
def test_two_gateways_call_each_message_of_an_agents_mailbox_once_with_its_own_secret(hub):
    name, here, there = member(hub)
    with receiving() as receiver:
        waiting = post(hub.operator, name, {"n": 0}).json()["message_id"]
        made = set_up(here, name, receiver.url, key="first").json()
        assert (made["webhook"], made["status"], made["revision"], made["topic"]) == (name, "active", 1, None)
        wait_until(lambda: receiver.ids() == [waiting], what="the message that waited")
        ids = [post(hub.operator, name, {"n": number}).json()["message_id"] for number in range(1, 20)]
        wait_until(lambda: set(statuses(hub, name).values()) == {"claimed"}, what="all are delivered")
        assert sorted(receiver.ids()) == sorted([waiting, *ids])
        for call in receiver.calls:
            verify(made["secret"], call.headers, call.body)
        assert {json.loads(call.body)["data"]["payload"]["n"] for call in receiver.calls} == set(range(20))
        # A test event is called at once, with a type of its own.
        tested = there.post(f"{WEBHOOKS}/{name}/test", json={}).json()
        assert (tested["delivered"], tested["status"], tested["why"]) == (True, 200, None)
        assert json.loads(receiver.calls[-1].body)["type"] == "trunkline.webhook.test"
        receiver.answers = [Answer(302, {"Location": "http://127.0.0.1:1/"})]
        tested = here.post(f"{WEBHOOKS}/{name}/test", json={}).json()
        assert (tested["delivered"], tested["status"]) == (False, 302)
        # The health of both gateways together.
        both = [shown(client, name) for client in (here, there)]
        assert sum(one["succeeded"] for one in both) == 20
        assert {(one["failures_in_a_row"], one["pending"], one["last_failure"]) for one in both} == {
            (0, 0, None)
        }
        metrics = "".join(client.get("/metrics").text for client in (here, there))
        assert 'trunkline_webhooks{status="active"}' in metrics
        # Rotation: for a while each call is signed with both secrets.
        again = set_up(here, name, receiver.url, overlap_s=600).json()
        assert again["secret"] != made["secret"]
        wait_until(lambda: shown(there, name)["revision"] == 2, what="the other gateway has it")
        count = len(receiver.calls)
        post(hub.operator, name)
        wait_until(lambda: len(receiver.calls) > count, what="the call after the rotation")
        for secret in (made["secret"], again["secret"]):
            verify(secret, receiver.calls[-1].headers, receiver.calls[-1].body)
        assert said(set_up(here, name, receiver.url, key="first")) == (409, "seq_conflict")


@pytest.mark.requirement("WH-01")
def test_a_webhook_is_its_mailboxs_owners_and_the_operators_who_pause_resume_and_remove_it(hub):
    name, owner, _ = member(hub)
    _, other, _ = member(hub)
    with receiving() as receiver:
        first = set_up(owner, name, receiver.url, key="k").json()
        assert set_up(owner, name, receiver.url, key="k").json()["secret"] == first["secret"]
        assert "secret" not in shown(owner, name)
        for path, body in (("", {"url": receiver.url}), ("/pause", {}), ("/remove", {}), ("/test", {})):
            assert said(other.post(f"{WEBHOOKS}/{name}{path}", json=body)) == (403, "policy")
        assert said(other.get(f"{WEBHOOKS}/{name}")) == (403, "policy")
        assert other.get(WEBHOOKS).json() == {"webhooks": [], "total": 0}
        assert [one["webhook"] for one in owner.get(WEBHOOKS).json()["webhooks"]] == [name]
        assert name in {one["webhook"] for one in hub.operator.get(WEBHOOKS).json()["webhooks"]}
        paused = hub.operator.post(f"{WEBHOOKS}/{name}/pause", json={"reason": "moving"}).json()
        assert (paused["status"], paused["why_paused"]) == ("paused", "moving")
        wait_until(lambda: shown(hub.other, name)["status"] == "paused", what="the other gateway has it")
        post(hub.operator, name)
        # A paused mailbox, as any, can be polled.
        wait_until(lambda: owner.get("/api/hub/messages").json()["messages"], what="the message, polled")
        post(hub.operator, name)
        assert receiver.calls == []
        assert owner.post(f"{WEBHOOKS}/{name}/resume", json={}).json()["status"] == "active"
        wait_until(lambda: len(receiver.calls) == 1, what="the message that waited")
        removed = owner.post(f"{WEBHOOKS}/{name}/remove", json={}).json()
        assert removed["status"] == "removed"
        assert said(owner.post(f"{WEBHOOKS}/{name}/test", json={})) == (404, "not_found")
        assert said(owner.post(f"{WEBHOOKS}/{name}/resume", json={})) == (409, "illegal_transition")
        hidden = first["secret"].removeprefix("whsec_")
        logs = [path.read_text(errors="replace") for path in hub.folder.rglob("*.log")]
        assert logs
        assert not any(hidden in text for text in logs)
        assert not any(hidden in str(one) for one in hub.log())


@pytest.mark.requirement("WH-01")
@pytest.mark.requirement("WH-03")
def test_unknown_mailboxes_and_addresses_that_may_not_be_called_are_refused(hub):
    name, owner, _ = member(hub)
    for url in ("http://10.0.0.1/", "https://[::1]/", "http://[::ffff:10.0.0.1]/", "http://167772161/"):
        assert said(set_up(owner, name, url)) == (403, "policy")
    for url in ("https://ann:pw@example.org/", "file:///etc/passwd", "https://example.org:0/"):
        assert said(set_up(owner, name, url)) == (400, "malformed")
    assert said(set_up(hub.operator, "nobody-knows", "https://example.org/")) == (404, "unknown_recipient")
    assert said(set_up(hub.operator, "hub", "https://example.org/")) == (400, "malformed")
    assert said(hub.operator.get(f"{WEBHOOKS}/{name}")) == (404, "not_found")
    # A name that leads to a private address is only known at the call.
    assert set_up(owner, name, "http://localhost:1/").status_code == 200
    tested = owner.post(f"{WEBHOOKS}/{name}/test", json={}).json()
    assert tested["delivered"] is False


@pytest.mark.requirement("WH-01")
def test_the_webhook_of_a_topic_is_called_with_what_is_published_until_it_is_removed(hub):
    topic, name = f"news-{next(_numbers)}", f"news-hook-{next(_numbers)}"
    publisher, client, _ = member(hub)

    def subscribers():
        found = hub.operator.get(f"{TOPICS}/{topic}")
        return [one["subscriber"] for one in found.json()["subscriptions"]] if found.is_success else []

    with receiving() as receiver:
        assert said(set_up(client, name, receiver.url, topic=topic)) == (403, "policy")
        assert said(set_up(hub.operator, publisher, receiver.url, topic=topic)) == (403, "policy")
        made = set_up(hub.operator, name, receiver.url, topic=topic).json()
        wait_until(lambda: subscribers() == [name], what="the subscription")
        client.post(f"{TOPICS}/{topic}", json={"type": "news", "payload": {"text": "rain"}})
        wait_until(lambda: len(receiver.calls) == 1, what="the call")
        (call,) = receiver.calls
        verify(made["secret"], call.headers, call.body)
        shown_data = json.loads(call.body)["data"]
        assert (shown_data["topic"], shown_data["sender"]) == (topic, publisher)
        assert shown_data["payload"] == {"text": "rain"}
        # The name is taken while the webhook has its mailbox.
        body = {"principal": name, "role": "worker"}
        assert said(hub.operator.post("/api/hub/principals", json=body)) == (403, "policy")
        assert said(set_up(hub.operator, name, receiver.url, topic="other")) == (409, "illegal_transition")
        assert hub.operator.post(f"{WEBHOOKS}/{name}/remove", json={}).status_code == 200
        wait_until(lambda: subscribers() == [], what="the end of the subscription")
        client.post(f"{TOPICS}/{topic}", json={"type": "news", "payload": {"text": "sun"}})
        assert len(receiver.calls) == 1


@pytest.mark.requirement("WH-01")
def test_a_webhook_ends_with_the_principal_of_its_mailbox(hub):
    name, owner, _ = member(hub)
    assert set_up(owner, name, "http://127.0.0.1:1/").status_code == 200
    assert hub.operator.post(f"/api/hub/principals/{name}/revoke", json={}).is_success
    wait_until(lambda: shown(hub.operator, name)["status"] == "removed", what="the removal")


@pytest.mark.slow
@pytest.mark.requirement("WH-02")
def test_a_gateway_that_is_killed_during_a_call_loses_no_message(hub):
    name, owner, _ = member(hub)
    with receiving() as receiver:
        receiver.answers = [Answer(delay_s=3)] * 3
        set_up(owner, name, receiver.url)
        ids = [post(hub.operator, name).json()["message_id"] for _ in range(3)]
        wait_until(lambda: len(receiver.calls) == 3, what="three calls under way")
        for gateway in hub.gateways:
            gateway.program.kill()
        hub.start()
        wait_until(lambda: set(statuses(hub, name).values()) == {"claimed"}, 60, what="all are delivered")
        assert sorted(set(receiver.ids())) == sorted(ids)
        # Each was called again under its id, because nobody had acknowledged it.
        assert sorted(receiver.ids()) == sorted([*ids, *ids])
