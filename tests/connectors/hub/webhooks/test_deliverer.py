"""The deliverer with real calls: each message is called until it succeeds or is dead (WH-02)."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
import structlog
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event
from cloudevents.core.formats.json import JSONFormat

from connectors.doors.dashboard.past_records import record_as_json
from connectors.hub.services.settled_stream import settled_as_json
from connectors.hub.serving.shares import ByteBudget
from schemas.keys.sealing import webhook_secret_purpose
from schemas.streams.webhook.webhooks import (
    WebhookResumed,
    WebhookRow,
    WebhookSet,
)
from tests.connectors.doors.mcp_tools.folded_hub import KEYRING
from tests.connectors.hub.webhooks.receiver import Answer, receiving
from tests.connectors.hub.webhooks.standard_webhooks import verify
from tests.connectors.hub.webhooks.webhook_hub import SECRET, WebhookHub, until

pytestmark = pytest.mark.long

FAILED = Answer(500)
BY_OPERATOR = {"door": "http", "principal": "operator"}


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


@pytest.mark.requirement("WH-02")
def test_a_slow_address_delays_no_other_one_and_has_few_calls_at_once():
    hub = WebhookHub(calls_at_once=3, timeout_s=20.0)

    async def run():
        hub.set("slow", slow.url)
        hub.set("quick", quick.url)
        async with hub.delivering():
            hub.post("slow", 10)
            await until(lambda: slow.at_once == 3)
            ids = hub.post("quick", 20)
            await until(lambda: all(hub.message("quick", one).status == "claimed" for one in ids))
            return len(slow.calls), slow.most_at_once

    with receiving() as slow, receiving() as quick:
        slow.answers = [Answer(delay_s=60)] * 10
        assert asyncio.run(run()) == (3, 3)


@pytest.mark.requirement("WH-02")
def test_calls_beyond_the_first_of_each_webhook_share_a_limit():
    hub = WebhookHub(calls_at_once=3, calls_shared=1, timeout_s=20.0)

    async def run():
        hub.set("ann", first.url)
        hub.set("bo", second.url)
        async with hub.delivering():
            ids = hub.post("ann", 5)
            await until(lambda: first.at_once == 2)
            hub.post("bo", 5)
            await until(lambda: second.at_once == 1)
            await asyncio.sleep(0.2)
            # A message that cannot be called now is not leased either.
            assert sum(hub.message("ann", one).status == "leased" for one in ids) == 2
            return first.most_at_once, second.most_at_once

    with receiving() as first, receiving() as second:
        first.answers, second.answers = [Answer(delay_s=60)] * 5, [Answer(delay_s=60)] * 5
        assert asyncio.run(run()) == (2, 1)


@pytest.mark.requirement("WH-02")
def test_an_address_that_is_down_is_called_seldom_and_its_messages_keep_their_attempts():
    hub = WebhookHub(retry_first_s=0.4, retry_most_s=0.4, max_attempts=5)

    async def run():
        hub.set("ann", receiver.url)
        ids = hub.post("ann", 40)
        async with hub.delivering():
            await asyncio.sleep(1.5)
            rows = [hub.message("ann", one) for one in ids]
            calls, untouched = len(receiver.calls), sum(row.attempts == 0 for row in rows)
            assert {row.status for row in rows} <= {"unread", "leased"}
            receiver.answers = []
            await until(lambda: all(hub.message("ann", one).status == "claimed" for one in ids), 20)
        return calls, untouched

    with receiving() as receiver:
        receiver.answers = [Answer(500, delay_s=0.1)] * 1000
        calls, untouched = asyncio.run(run())
    assert 4 <= calls <= 12, calls
    assert untouched >= 28


@pytest.mark.requirement("WH-02")
def test_retry_after_lengthens_the_pause_up_to_the_longest_one():
    hub = WebhookHub(retry_first_s=0.01, retry_most_s=1.0)

    async def run():
        hub.set("ann", receiver.url)
        (message_id,) = hub.post("ann")
        async with hub.delivering():
            await until(lambda: hub.message("ann", message_id).status == "claimed")

    with receiving() as receiver:
        receiver.answers = [Answer(429, {"Retry-After": "1"}), Answer(503, {"Retry-After": "86400"})]
        asyncio.run(run())
    pauses = [later.at - call.at for call, later in pairwise(receiver.calls)]
    assert len(pauses) == 2
    assert all(0.9 <= pause < 3 for pause in pauses)


@pytest.mark.requirement("WH-02")
def test_an_address_that_is_gone_pauses_the_webhook_and_the_message_waits_without_an_attempt():
    hub = WebhookHub()

    async def run():
        hub.set("ann", receiver.url)
        (message_id,) = hub.post("ann")
        async with hub.delivering(gateways=2):
            await until(lambda: hub.message("ann", message_id).status == "unread" and receiver.calls)
            assert hub.get(WebhookRow, "ann").status == "paused"
            row = hub.message("ann", message_id)
            assert (row.status, row.attempts) == ("unread", 0)
            assert hub.get(WebhookRow, "ann").why_paused == "the address answered 410 Gone"
            await asyncio.sleep(0.3)
            calls = len(receiver.calls)
            resumed = WebhookResumed(name="ann", request_id="again")
            hub.add(resumed.record(**BY_OPERATOR))
            await until(lambda: hub.message("ann", message_id).status == "claimed")
        return calls

    with receiving() as receiver:
        receiver.answers = [Answer(410)]
        assert asyncio.run(run()) == 1
    assert len(receiver.calls) == 2


@pytest.mark.requirement("WH-02")
def test_the_pause_before_a_retry_outlives_the_gateway():
    hub = WebhookHub(retry_first_s=2.0, retry_most_s=2.0)

    async def run():
        hub.set("ann", receiver.url)
        (message_id,) = hub.post("ann")
        async with hub.delivering():
            await until(lambda: len(receiver.calls) == 1)
            await until(lambda: hub.message("ann", message_id).lease_until > hub.now_us + 500_000)
        async with hub.delivering():
            await until(lambda: hub.message("ann", message_id).status == "claimed")
        return hub.message("ann", message_id).attempts

    with receiving() as receiver:
        receiver.answers = [FAILED]
        assert asyncio.run(run()) == 2
    first, second = receiver.calls
    assert 0.9 <= second.at - first.at <= 4


@pytest.mark.requirement("WH-02")
def test_a_gateway_that_ends_between_call_and_acknowledgement_leaves_the_message_to_be_called_again():
    hub = WebhookHub()

    async def run():
        hub.set("ann", receiver.url)
        (message_id,) = hub.post("ann")
        async with hub.delivering():
            hub.is_dying = True
            await until(lambda: len(receiver.calls) == 1)
        assert hub.message("ann", message_id).status == "leased"
        hub.is_dying = False
        async with hub.delivering():
            await until(lambda: hub.message("ann", message_id).status == "claimed")
        return message_id

    with receiving() as receiver:
        message_id = asyncio.run(run())
    assert receiver.ids() == [message_id] * 2
    assert receiver.calls[0].headers["webhook-signature"] != receiver.calls[1].headers["webhook-signature"]


@pytest.mark.requirement("WH-02")
def test_an_acknowledgement_waits_for_kafka_and_the_message_is_called_once():
    hub = WebhookHub(timeout_s=10.0)

    async def run():
        hub.set("ann", receiver.url)
        (message_id,) = hub.post("ann")
        async with hub.delivering():
            await until(lambda: len(receiver.calls) == 1)
            hub.is_away = True
            await asyncio.sleep(0.7)
            assert hub.message("ann", message_id).status == "leased"
            hub.is_away = False
            await until(lambda: hub.message("ann", message_id).status == "claimed")

    with receiving() as receiver:
        receiver.answers = [Answer(delay_s=0.2)]
        asyncio.run(run())
    assert len(receiver.calls) == 1


@pytest.mark.requirement("CM-05")
def test_neither_the_log_nor_the_reason_of_a_failure_has_the_secret_the_path_or_the_answer():
    hub = WebhookHub(max_attempts=1)

    async def run():
        hub.set("ann", f"{receiver.url}&key=hidden")
        (message_id,) = hub.post("ann")
        async with hub.delivering():
            await until(lambda: hub.message("ann", message_id).status == "dead")
        return hub.message("ann", message_id)

    with receiving() as receiver, structlog.testing.capture_logs() as lines:
        receiver.answers = [Answer(500, body=b"hidden")]
        row = asyncio.run(run())
    assert [line["event"] for line in lines] == ["webhook_failed"]
    for text in (str(lines), str(row), str(hub.webhook_health.of("ann"))):
        for hidden in ("hidden", SECRET, SECRET[6:], "/inbox"):
            assert hidden not in text


@pytest.mark.requirement("WH-02")
def test_a_mailbox_that_seems_to_have_messages_and_gives_none_costs_few_records(monkeypatch):
    # As when this machine's clock is ahead of the log's, at the end of a lease.
    hub = WebhookHub()
    monkeypatch.setattr(hub.mailboxes, "ready", lambda *_: 1)
    asked = []
    true = hub.add
    monkeypatch.setattr(hub, "add", lambda outgoing: asked.append(outgoing.type) or true(outgoing))

    async def run():
        hub.set("ann", receiver.url)
        async with hub.delivering():
            await asyncio.sleep(1.5)
            leases = asked.count("message.leased")
            hub.post("ann", 20)
            await until(lambda: len(receiver.calls) == 20)
        return leases

    with receiving() as receiver:
        assert 2 <= asyncio.run(run()) <= 7


@pytest.mark.requirement("WH-02")
def test_a_new_address_is_called_at_once_although_the_old_one_was_down():
    hub = WebhookHub(retry_first_s=30.0, retry_most_s=30.0)

    async def run():
        hub.set("ann", receiver.url.replace(str(receiver.port), "1"))
        async with hub.delivering():
            # As many as are called at once. Of more, some could fail before the address counts as down.
            hub.post("ann", 4)
            await until(lambda: hub.webhook_health.of("ann").failures_in_a_row == 4)
            hub.post("ann", 2)
            hub.set("ann", receiver.url)
            await until(lambda: len(receiver.calls) == 2, 5)

    with receiving() as receiver:
        asyncio.run(run())


@pytest.mark.requirement("CM-05")
def test_neither_hub_nor_dashboard_shows_the_sealed_secret_of_a_record():
    hub = WebhookHub()
    options = {"topic": None, "overlap_ms": 0, "request_id": "w1"}
    record = WebhookSet(
        sealed_secret=KEYRING.seal(SECRET.encode(), webhook_secret_purpose("ann")),
        name="ann",
        url="https://example.org/",
        **options,
    ).record(**BY_OPERATOR)
    settled = hub.add(record)
    assert b"sealed_secret" in (settled.value or b"")
    for shown in (
        settled_as_json(settled),
        record_as_json(settled, "operator"),
        record_as_json(settled, "viewer"),
    ):
        assert "sealed" not in str(shown)


@pytest.mark.requirement("LM-13")
def test_calls_of_webhooks_share_the_memory_of_answers_and_all_messages_arrive():
    hub = WebhookHub()
    hub.answer_memory = ByteBudget(1024 * 1024)
    names = ["ann", "bo", "cy"]

    async def run():
        for name in names:
            hub.set(name, receiver.url)
        ids = {name: hub.post(name, body=json.dumps("x" * 600_000))[0] for name in names}
        async with hub.delivering():
            await until(lambda: receiver.calls)
            used, waiting = hub.answer_memory.used, hub.answer_memory.waiting
            await until(lambda: all(hub.message(name, one).status == "claimed" for name, one in ids.items()))
        return used, waiting, set(ids.values())

    with receiving() as receiver:
        receiver.answers = [Answer(200, delay_s=0.3)]
        used, waiting, ids = asyncio.run(run())
    assert 600_000 < used < 700_000, "one event alone is in memory"
    assert waiting == 2
    assert set(receiver.ids()) == ids
    assert (hub.answer_memory.used, hub.answer_memory.waiting) == (0, 0)
