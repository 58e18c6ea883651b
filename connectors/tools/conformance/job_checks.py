"""Checks of job events: over HTTP and MQTT, with the outbox across kills.

Over HTTP: signature, order, repetitions and rejections. Over MQTT: receipts true and forged, lost connections.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

from connectors.tools.conformance.client_process import ClientProcess, ClientRefused
from connectors.tools.conformance.http_proxy import Fault
from connectors.tools.conformance.mqtt_proxy import MqttFault, Publish
from connectors.tools.conformance.scene import (
    CALL_S,
    CheckFailed,
    Checks,
    Registered,
    Scene,
    expect,
    expect_error,
    wait_hit,
)
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

CHECKS: Final = Checks()
HTTP: Final = "http"
# Long enough for a second process to do wrong.
_OTHER_S: Final = 1.0
_AFTER_END: Final = "after_terminal"
LIFE: Final = (("started", "begins"), ("progress", "größer 𝄞"), ("progress", ""), ("completed", "done"))


def events_path(job: Registered) -> str:
    """Return the path at which the hub takes the events of a job."""
    return f"/api/hub/jobs/{job.job_id}/events"


def published(client: ClientProcess, job: Registered, event: str, detail: str, **data: Any) -> dict[str, Any]:
    """Let the client publish an event, and return its receipt. Raises CheckFailed for an incomplete one."""
    given = {"job_id": job.job_id, "event": event, "detail": detail, "data": data}
    receipt = client.call("job_publish", CALL_S, **given).get("receipt")
    if not isinstance(receipt, dict) or receipt.get("verdict") not in (ACCEPTED, DUPLICATE, None):
        raise CheckFailed(f"{event}: expected the receipt of a stored event, found {receipt!r}")
    return receipt


def expect_log(job: Registered, *details: str) -> None:
    """Check that the log has these events of a job once and in this order, with rising seq from 1 on."""
    found = job.settled(len(details))
    expect([one["detail"] for one in found], list(details), "the details of the accepted events")
    expect([one["seq"] for one in found], list(range(1, len(details) + 1)), "the seq of the accepted events")


def resent(client: ClientProcess, job: Registered) -> int:
    """Let the client send what is in its outbox, and return how many events it says that there were."""
    count = client.call("job_resend", CALL_S, job_id=job.job_id).get("count")
    if type(count) is not int:
        raise CheckFailed(f"job_resend: expected a count, found {count!r}")
    return count


def check_receipts(receipts: list[dict[str, Any]], sent: list[bytes], subject: str) -> None:
    """Check that receipts belong to the payloads that were sent. `subject` is the stream, or the topic."""
    expected = [content_id(subject.encode(), payload) for payload in sent]
    expect([one.get("ce_id") for one in receipts], expected, "the ce_id of the receipts")
    expect([one.get("seq") for one in receipts], list(range(1, len(sent) + 1)), "the seq of the receipts")
    if any(not isinstance(one.get("position"), dict) for one in receipts):
        raise CheckFailed(f"receipts without a position: {receipts!r}")


def check_rejected(client: ClientProcess, job: Registered) -> None:
    """Check that an event of a cancelled job is reported as rejected, and that the outbox then is empty."""
    given = {"job_id": job.job_id, "event": "progress", "detail": "too late", "data": {}}
    error = expect_error(
        "rejected", lambda: client.call("job_publish", CALL_S, **given), "an event of a cancelled job"
    )
    expect(error.reason, _AFTER_END, "the reason")
    expect(resent(client, job), 0, "the events in the outbox after a rejection")


def _sent(scene: Scene, job: Registered) -> list[bytes]:
    return [one.body for one in scene.http.exchanges("POST", events_path(job))]


@CHECKS.add("job_http")
def job_http_life(scene: Scene) -> None:
    """Check that a job's events over HTTP are accepted in order, with receipts that belong to their bytes."""
    job = scene.job()
    client = scene.job_client(job, HTTP)
    receipts = [published(client, job, event, detail, n=1.0) for event, detail in LIFE]
    check_receipts(receipts, _sent(scene, job), f"job/{job.job_id}")
    expect_log(job, *(detail for _, detail in LIFE))
    client.leave()


@CHECKS.add("job_http")
def job_http_repeats_the_same_bytes(scene: Scene) -> None:
    """Check that an event whose answer was lost or was 503 is repeated with the same bytes within the call."""
    job = scene.job()
    client = scene.job_client(job, HTTP)
    path = events_path(job)
    scene.http.plant(Fault("POST", path, forward=True))
    published(client, job, "started", "one")
    scene.http.plant(Fault("POST", path, answer=(503, {"Retry-After": "1"}, {"reason": "unreachable"})))
    published(client, job, "progress", "two")
    by_seq: dict[int, set[bytes]] = {}
    for body in _sent(scene, job):
        by_seq.setdefault(json.loads(body)["seq"], set()).add(body)
    expect({seq: len(bodies) for seq, bodies in by_seq.items()}, {1: 1, 2: 1}, "different payloads of each seq")
    expect_log(job, "one", "two")


@CHECKS.add("job_http")
def job_http_killed_before_send(scene: Scene) -> None:
    """Check that an event is in the outbox before it is sent: it survives a kill before the hub has it."""
    _survives_a_kill(scene, HTTP, is_sent=False)


@CHECKS.add("job_http")
def job_http_killed_before_answer(scene: Scene) -> None:
    """Check that an event is not changed by a kill after it was sent: it is there once."""
    _survives_a_kill(scene, HTTP, is_sent=True)


def _survives_a_kill(scene: Scene, door: str, *, is_sent: bool) -> None:
    """Kill the client while it publishes the event `two`, before or after the hub or its broker has it."""
    job = scene.job()
    client = scene.job_client(job, door)
    published(client, job, "started", "one")
    if door == HTTP:
        fault: Fault | MqttFault = scene.http.plant(Fault("POST", events_path(job), forward=is_sent, hold=True))
    else:
        fault = scene.mqtt.plant(MqttFault(forward=is_sent, hold=True))
    client.begin("job_publish", CALL_S, job_id=job.job_id, event="progress", detail="two", data={})
    wait_hit(fault.hit, "the event, or the hub sent no receipt of the first,")
    client.kill()
    fault.release()
    again = scene.job_client(job, door)
    if not is_sent:
        expect(resent(again, job), 1, "the events in the outbox after the kill")
    # An event that was sent needs no call of job_resend: the next one sends it first.
    published(again, job, "progress", "three")
    expect_log(job, "one", "two", "three")


@CHECKS.add("job_http")
def job_http_unreachable_keeps_events(scene: Scene) -> None:
    """Check that events of a call that ended as `unreachable` are sent by the next call, in order."""
    job = scene.job()
    client = scene.job_client(job, HTTP, patience_s=1.0)
    published(client, job, "started", "one")
    scene.http.plant(Fault("POST", events_path(job), times=1000))
    given = {"job_id": job.job_id, "event": "progress", "detail": "two", "data": {}}
    expect_error("unreachable", lambda: client.call("job_publish", CALL_S, **given), "an event without a hub")
    scene.http.heal()
    published(client, job, "progress", "three")
    expect_log(job, "one", "two", "three")


@CHECKS.add("job_http")
def job_http_rejections_are_reported(scene: Scene) -> None:
    """Check that an event with the verdict `rejected` is reported with its reason, and not sent again."""
    job = scene.job()
    client = scene.job_client(job, HTTP)
    published(client, job, "started", "one")
    scene.cancel(job.job_id)
    before = len(_sent(scene, job))
    check_rejected(client, job)
    expect(len(_sent(scene, job)) - before, 1, "how often the rejected event was sent")


@CHECKS.add("job_http")
def job_http_outbox_has_one_writer(scene: Scene) -> None:
    """Check that two processes with one state folder do not use a seq twice: one waits, or is `outbox_busy`."""
    job = scene.job()
    one, other = scene.job_client(job, HTTP), scene.job_client(job, HTTP)
    fault = scene.http.plant(Fault("POST", events_path(job), hold=True))
    one.begin("job_publish", CALL_S, job_id=job.job_id, event="started", detail="one", data={})
    wait_hit(fault.hit, "the event")
    other.begin("job_publish", CALL_S, job_id=job.job_id, event="progress", detail="two", data={})
    time.sleep(_OTHER_S)
    expect(len(_sent(scene, job)), 1, "the requests while the first process has the outbox")
    fault.release()
    one.finish()
    _finish_or_repeat(other, job)
    expect_log(job, "one", "two")


def _finish_or_repeat(client: ClientProcess, job: Registered) -> None:
    try:
        client.finish()
    except ClientRefused as error:
        if error.kind != "outbox_busy":
            raise
        published(client, job, "progress", "two")


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
    _survives_a_kill(scene, MQTT, is_sent=False)


@CHECKS.add("job_mqtt")
def job_mqtt_killed_before_receipt(scene: Scene) -> None:
    """Check that an event is not changed by a kill after it was sent: it is there once."""
    _survives_a_kill(scene, MQTT, is_sent=True)


def _published_or_resent(client: ClientProcess, job: Registered, given: dict[str, Any]) -> None:
    try:
        client.call("job_publish", CALL_S, **given)
    except ClientRefused as error:
        if error.kind != "unreachable":
            raise
        expect(resent(client, job), 1, "the events in the outbox")
