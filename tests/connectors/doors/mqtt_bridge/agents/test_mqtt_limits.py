"""The limits of agents over MQTT, end to end: gateway, bridge and brokers (LM-05)."""

from __future__ import annotations

import json
import time
import uuid

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.mqtt_bridge.agents.mail_run import MailRun
from tests.mqtt_wire import listening
from trunkline_agent.errors import MessageRejected
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.wire.agent_message import sign_said
from trunkline_agent.wire.strict_json import canonical


def fresh(name: str) -> str:
    """A name that nothing has yet."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.mark.requirement("LM-01")
@pytest.mark.requirement("LM-05")
def test_an_agent_gets_a_receipt_that_the_mailbox_of_its_recipient_is_full(run: MailRun) -> None:
    ann, away = run.agent(fresh("ann")), run.agent(fresh("away"))
    limits = run.operator.post(f"/api/hub/limits/name/{away.name}", json={"pending_most": 1})
    assert limits.status_code == 200, limits.text
    refused = []
    with ann as speaks:
        sent = speaks.send(away.name, "note", 0).message_id
        for number in range(1, 40):
            with pytest.raises(MessageRejected) as error:
                speaks.send(away.name, "note", number)
            refused.append(error.value.receipt)
        ann.wait(1)
    assert {(one.reason, one.retry_after_s) for one in refused} == {("mailbox_full", 1)}
    assert list(run.mailbox(away.name)) == [sent]
    # The first is in the log. For a second after each such message nothing is appended.
    logged = run.verdicts("agent.said", f"agent/{ann.name}")["accepted"]
    assert logged == 1 + sum(one.position is not None for one in refused) < 20
    assert {json.loads(one.body)["reason"] for one in ann.got} == {"mailbox_full"}
    assert len(ann.got) <= 2, "one a minute"
    assert run.operator.post(f"/api/hub/limits/name/{away.name}", json={}).status_code == 200
    with ann as speaks:
        wait_until(lambda: speaks.resend() == 0, what="nothing is left to be sent again")
        wait_until(lambda: _is_taken(speaks, away.name), 10, "there is room again")


def _is_taken(speaks: MqttAgent, to: str) -> bool:
    try:
        return speaks.send(to, "note", "again").verdict == "accepted"
    except MessageRejected:
        return False


@pytest.mark.requirement("LM-05")
def test_a_flood_over_mqtt_is_cut_to_the_agents_rate_with_receipts_and_few_records(run: MailRun) -> None:
    ann, reader = run.agent(fresh("ann")), fresh("reader")
    run.principal(reader).close()
    limits = run.operator.post(f"/api/hub/limits/name/{ann.name}", json={"messages_per_minute": 30})
    assert limits.status_code == 200, limits.text

    def asked() -> float:
        return time.monotonic() - began > 2

    began = time.monotonic()
    wait_until(asked, what="the bridge has asked for the rates, which it does each second")
    payloads = [
        canonical(
            sign_said(
                {"message_id": f"f-{n}", "to": reader, "kind": "flood", "body": n, "seq": n},
                ann.credentials.mqtt.secret,
            )
        )
        for n in range(1, 301)
    ]
    mqtt = run.settings.mqtt.model_copy(update={"topic_prefix": run.settings.mqtt.agents_prefix})
    with listening(mqtt, f"{ann.name}/inbox") as heard:
        run.say(ann.name, *payloads)
        wait_until(lambda: len(heard) >= 300, 30, "each message has a receipt")
    receipts = [json.loads(one.payload) for one in heard]
    refused = [one for one in receipts if one["reason"] == "rate_limited"]
    taken = len(receipts) - len(refused)
    assert 30 <= taken <= 40 and all(one["retry_after_s"] >= 1 for one in refused)
    assert run.verdicts("agent.said", f"agent/{ann.name}") == {"accepted": taken}
    refusals = [body for stream, _, body in run.log("request.refused") if stream == "refused/mqtt"]
    assert 1 <= sum(json.loads(one)["principal"] == ann.name for one in refusals) <= 7
    wait_until(lambda: len(run.mailbox(reader)) == taken, 30, "those that were taken are posted")
