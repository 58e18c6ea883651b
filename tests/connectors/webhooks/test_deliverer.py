"""The deliverer with real calls: each message is called until it succeeds or is dead (WH-02)."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event
from cloudevents.core.formats.json import JSONFormat

from tests.connectors.webhooks.receiver import Answer, receiving
from tests.connectors.webhooks.standard_webhooks import verify
from tests.connectors.webhooks.webhook_hub import SECRET, WebhookHub, until

FAILED = Answer(500)


@pytest.mark.requirement("WH-02")
def test_a_message_is_called_as_a_signed_cloud_event_and_acknowledged():
    hub = WebhookHub()

    async def run():
        hub.set("ann", receiver.url)
        (message_id,) = hub.post("ann")
        async with hub.delivering():
            await until(lambda: hub.message("ann", message_id).status == "claimed")
        return message_id

    with receiving() as receiver:
        message_id = asyncio.run(run())
    (call,) = receiver.calls
    verify(SECRET, call.headers, call.body)
    event = from_structured_event(HTTPMessage(call.headers, call.body), JSONFormat())
    assert (event.get_id(), event.get_type(), event.get_subject()) == (message_id, "trunkline.message", "ann")
    assert call.headers["content-type"] == "application/cloudevents+json"
    assert (call.path, call.headers["host"]) == ("/inbox?from=trunkline", f"127.0.0.1:{receiver.port}")
    shown = json.loads(call.body)["data"]
    assert (shown["sender"], shown["type"], shown["payload"]) == ("bo", "ask", {"text": "tea"})
    row = hub.message("ann", message_id)
    assert (row.attempts, row.handed_to) == (1, "webhook/ann")


@pytest.mark.requirement("WH-02")
def test_a_failed_call_is_repeated_with_growing_pauses_under_the_same_id_until_it_succeeds():
    hub = WebhookHub(retry_first_s=0.2, retry_most_s=5.0)

    async def run():
        hub.set("ann", receiver.url)
        (message_id,) = hub.post("ann")
        async with hub.delivering():
            await until(lambda: hub.message("ann", message_id).status == "claimed")
        return message_id

    with receiving() as receiver:
        receiver.answers = [Answer(500), Answer(503)]
        message_id = asyncio.run(run())
    assert receiver.ids() == [message_id] * 3
    pauses = [later.at - call.at for call, later in pairwise(receiver.calls)]
    assert 0.1 <= pauses[0] < 0.4 and 0.2 <= pauses[1] < 0.8
    for call in receiver.calls:
        verify(SECRET, call.headers, call.body)
    assert len({call.body for call in receiver.calls}) <= 3
    assert hub.webhook_health.of("ann").failures_in_a_row == 0


@pytest.mark.requirement("WH-02")
def test_a_message_is_dead_after_its_last_attempt_with_the_reason_and_is_called_no_more():
    hub = WebhookHub(max_attempts=3)

    async def run():
        hub.set("ann", receiver.url)
        (message_id,) = hub.post("ann")
        async with hub.delivering():
            await until(lambda: hub.message("ann", message_id).status == "dead")
            (other,) = hub.post("ann")
            await until(lambda: hub.message("ann", other).status == "claimed")
        return message_id

    with receiving() as receiver:
        receiver.answers = [FAILED] * 3
        message_id = asyncio.run(run())
    assert receiver.ids().count(message_id) == 3
    row = hub.message("ann", message_id)
    assert (row.attempts, row.last_reason) == (3, "webhook: HTTP status 500")


@pytest.mark.requirement("WH-02")
def test_two_gateways_call_each_message_once():
    hub = WebhookHub()

    async def run():
        hub.set("ann", receiver.url)
        async with hub.delivering(gateways=2):
            ids = hub.post("ann", 30)
            await until(lambda: all(hub.message("ann", one).status == "claimed" for one in ids))
        return ids

    with receiving() as receiver:
        ids = asyncio.run(run())
    assert sorted(receiver.ids()) == sorted(ids)
