"""Checks of job events over MQTT: receipts true and forged, the outbox across kills, lost connections."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from connectors.tools.conformance.check import Checks
from connectors.tools.conformance.client_process import ClientProcess, ClientRefused
from connectors.tools.conformance.job_checks import (
    LIFE,
    check_receipts,
    check_rejected,
    expect_log,
    published,
    resent,
)
from connectors.tools.conformance.mqtt_packets import Publish
from connectors.tools.conformance.mqtt_proxy import MqttFault
from connectors.tools.conformance.scene import CALL_S, Registered, Scene, expect, expect_error, wait_hit

CHECKS: Final = Checks()
MQTT: Final = "mqtt"
_SHORT_S: Final = 1.0
_POSITION: Final = {"partition": 0, "offset": 1}


def _topic(scene: Scene, job: Registered) -> str:
    return f"{scene.target.settings.mqtt.topic_prefix}/{job.job_id}/events"


def _forged(verdict: str, reason: str | None) -> Callable[[Publish], list[bytes]]:
    """Return a maker of receipts of an event's seq with another ce_id, and of bytes that are no receipt."""

    def made(publish: Publish) -> list[bytes]:
        seq = json.loads(publish.payload)["seq"]
        receipt: dict[str, Any] = {"ce_id": "0" * 64, "seq": seq, "verdict": verdict, "reason": reason}
        without_id = {name: value for name, value in receipt.items() if name != "ce_id"}
        found: list[Any] = [{**receipt, "position": _POSITION}, {**without_id, "position": _POSITION}, [], None]
        return [json.dumps(one).encode() for one in found] + [b"\xff", b""]

    return made


@CHECKS.add("job_mqtt")
def job_mqtt_life(scene: Scene) -> None:
    """Check that a job's events are accepted in order, each with its receipt; only the end is retained."""
    job = scene.job()
    client = scene.job_client(job, MQTT)
    receipts = [published(client, job, event, detail) for event, detail in LIFE]
    sent = scene.mqtt.published
    check_receipts(receipts, [one.payload for one in sent], _topic(scene, job))
    expect([one.is_retained for one in sent], [False, False, False, True], "which events are retained")
    expect_log(job, *(detail for _, detail in LIFE))
    client.leave()


@CHECKS.add("job_mqtt")
def job_mqtt_waits_for_the_receipt(scene: Scene) -> None:
    """Check that a PUBACK confirms nothing: an event without a receipt is `unreachable`, and kept."""
    job = scene.job()
    client = scene.job_client(job, MQTT, patience_s=_SHORT_S, receipt_timeout_s=_SHORT_S)
    published(client, job, "started", "one")
    for _ in range(10):
        scene.mqtt.plant(MqttFault(acknowledge=True))
    given = {"job_id": job.job_id, "event": "progress", "detail": "two", "data": {}}
    expect_error(
        "unreachable", lambda: client.call("job_publish", CALL_S, **given), "an event without a receipt"
    )
    scene.mqtt.heal()
    expect(resent(client, job), 1, "the events in the outbox")
    expect_log(job, "one", "two")


@CHECKS.add("job_mqtt")
def job_mqtt_forged_receipts(scene: Scene) -> None:
    """Check that a forged receipt (other ce_id, same seq) is ignored, and the true one after it counts."""
    job = scene.job()
    client = scene.job_client(job, MQTT)
    scene.mqtt.plant(MqttFault(forward=True, forged=_forged("rejected", "bad_signature")))
    receipts = [published(client, job, "started", "one")]
    scene.mqtt.plant(MqttFault(forward=True, forged=_forged("accepted", None)))
    receipts.append(published(client, job, "progress", "two"))
    check_receipts(receipts, [one.payload for one in scene.mqtt.published], _topic(scene, job))
    expect_log(job, "one", "two")


@CHECKS.add("job_mqtt")
def job_mqtt_rejections_are_reported(scene: Scene) -> None:
    """Check that a true receipt with the verdict `rejected` is reported with its reason."""
    job = scene.job()
    client = scene.job_client(job, MQTT)
    published(client, job, "started", "one")
    scene.cancel(job.job_id)
    check_rejected(client, job)


@CHECKS.add("job_mqtt")
def job_mqtt_repeats_the_same_bytes(scene: Scene) -> None:
    """Check that an event whose connection was lost before its receipt is repeated with the same bytes."""
    job = scene.job()
    client = scene.job_client(job, MQTT)
    scene.mqtt.plant(MqttFault(forward=True, cut=True))
    given = {"job_id": job.job_id, "event": "started", "detail": "one", "data": {}}
    _published_or_resent(client, job, given)
    expect(len({one.payload for one in scene.mqtt.published}), 1, "different payloads")
    expect_log(job, "one")


@CHECKS.add("job_mqtt")
def job_mqtt_killed_before_send(scene: Scene) -> None:
    """Check that an event is in the outbox before it is sent: it survives a kill before the broker has it."""
    job = scene.job()
    client = scene.job_client(job, MQTT)
    published(client, job, "started", "one")
    _killed(scene, job, client, forward=False)
    again = scene.job_client(job, MQTT)
    expect(resent(again, job), 1, "the events in the outbox after the kill")
    published(again, job, "progress", "three")
    expect_log(job, "one", "two", "three")


@CHECKS.add("job_mqtt")
def job_mqtt_killed_before_receipt(scene: Scene) -> None:
    """Check that an event is not changed by a kill after it was sent: it is there once."""
    job = scene.job()
    client = scene.job_client(job, MQTT)
    published(client, job, "started", "one")
    _killed(scene, job, client, forward=True)
    again = scene.job_client(job, MQTT)
    published(again, job, "progress", "three")
    expect_log(job, "one", "two", "three")


def _killed(scene: Scene, job: Registered, client: ClientProcess, *, forward: bool) -> None:
    """Kill the client while it publishes the event `two`, before the broker or after Kafka has it."""
    fault = scene.mqtt.plant(MqttFault(forward=forward, hold=True))
    client.begin("job_publish", CALL_S, job_id=job.job_id, event="progress", detail="two", data={})
    wait_hit(fault.hit, "the event, or the hub sent no receipt,")
    client.kill()
    fault.release()


def _published_or_resent(client: ClientProcess, job: Registered, given: dict[str, Any]) -> None:
    try:
        client.call("job_publish", CALL_S, **given)
    except ClientRefused as error:
        if error.kind != "unreachable":
            raise
        expect(resent(client, job), 1, "the events in the outbox")
