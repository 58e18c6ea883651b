"""Receipts with verdicts: the bridge, a real fold behind an HTTP stream, and what the publisher makes of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from connectors.doors.mqtt_bridge.bridge_records import job_event_record
from connectors.log.publisher import Publisher
from connectors.plumbing.gateway_client.verdict_stream import VerdictStream
from schemas.settings.settings import PROJECT_ROOT
from schemas.wire.record import Position
from tests.broker_processes import program_environment, wait_until, with_mqtt
from tests.connectors.doors.http_api.hub_access import GatewayProcess, register
from tests.connectors.verdict_server import VerdictServer
from tests.mqtt_wire import listening, publish_all
from tests.registered_jobs import register_job
from tests.schemas.job_records import signed
from trunkline_agent.errors import EventRejected
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("JE-17")
# Longer than any verdict takes here: a receipt without one is then no matter of a slow machine.
WAIT_S = 10


@pytest.fixture
def verdicts(backbone_settings):
    found = VerdictServer(with_mqtt(backbone_settings, receipt_verdict_wait_s=WAIT_S))
    yield found
    found.close()


@pytest.fixture
def job(backbone_settings, keyring):
    with Publisher(backbone_settings) as publisher:
        return register_job(publisher, keyring, "count the stars")


def _event(job, seq, kind="progress", secret=None):
    return f"{job.job_id}/events", canonical(signed(seq, kind, secret or job.secret, job_id=job.job_id))


def _verdicts_of(receipts):
    return [(r["seq"], r["verdict"], r["reason"]) for r in (json.loads(m.payload) for m in receipts)]


@pytest.fixture
def start_following(verdicts, start_bridge):
    """Starts a bridge and waits until it follows the verdicts: until then its receipts say null."""

    def start(settings):
        bridge = start_bridge(settings)
        wait_until(lambda: _opened(bridge), what="the verdict stream")
        return bridge

    return start


def _opened(bridge):
    return bridge.log().count("verdicts_open")


def test_a_receipt_tells_how_the_event_was_settled_and_why(verdicts, start_following, job, read_topic):
    start_following(verdicts.settings)
    mqtt = verdicts.settings.mqtt
    good = _event(job, 1, "started")
    with listening(mqtt, "+/receipts") as receipts:
        for number, message in enumerate(
            [good, good, _event(job, 2, secret="another"), _event(job, 1, "error"), _event(job, 2, "completed")]
        ):
            publish_all(mqtt, [message])
            wait_until(lambda number=number: len(receipts) == number + 1, what="a receipt")
    assert _verdicts_of(receipts) == [
        (1, "accepted", None),
        (1, "duplicate", None),
        (2, "rejected", "bad_signature"),
        (1, "rejected", "seq_conflict"),
        (2, "accepted", None),
    ]
    for record, receipt in zip(read_topic(6)[1:], receipts, strict=True):
        position = json.loads(receipt.payload)["position"]
        assert position == {"partition": record.partition, "offset": record.offset}


def test_a_rejection_ends_publish_with_4_and_a_duplicate_counts_as_delivered(
    verdicts, start_following, job, tmp_path
):
    start_following(verdicts.settings)
    publisher = Job(job.job_id, job.secret, mqtt=verdicts.settings.mqtt, state_dir=tmp_path / "state")
    assert publisher.publish("started", "x").verdict == "accepted"
    # The same event again, as after a crash between receipt and note: the state of before.
    state = tmp_path / "state" / f"{job.job_id}.json"
    with listening(verdicts.settings.mqtt, "+/events") as sent:
        assert publisher.publish("progress", "y").verdict == "accepted"
    entry = {"seq": 2, "event": "progress", "payload": sent[0].payload.decode()}
    state.write_text(json.dumps({**json.loads(state.read_text()), "outbox": [entry]}))
    assert publisher.resend() == 1
    with pytest.raises(EventRejected, match="bad_signature") as caught:
        Job(job.job_id, "wrong", mqtt=verdicts.settings.mqtt, state_dir=tmp_path / "other").publish(
            "started", "x"
        )
    assert caught.value.exit_code == 4
    environment = program_environment(verdicts.settings) | {"TRUNKLINE_JOB_SECRET": "wrong"}
    command = [sys.executable, "-P", "-m", "connectors.cli", "publish", "--job", job.job_id]
    command += ["--event", "progress", "--detail", "z", "--state-dir", str(tmp_path / "third")]
    environment["PYTHONPATH"] = str(PROJECT_ROOT)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4, done.stderr
    assert "bad_signature" in done.stderr


def test_a_verdict_that_comes_too_late_is_null_in_the_receipt(verdicts, start_following, job):
    settings = with_mqtt(verdicts.settings, receipt_verdict_wait_s=0.7)
    start_following(settings)
    verdicts.mute.set()
    with listening(settings.mqtt, "+/receipts") as receipts:
        began = time.monotonic()
        publish_all(settings.mqtt, [_event(job, 1)])
        wait_until(lambda: receipts, what="a receipt")
        waited_s = time.monotonic() - began
    assert _verdicts_of(receipts) == [(1, None, None)]
    # It has waited, but for the setting's time only.
    assert 0.7 <= waited_s < WAIT_S / 2


def test_while_the_gateway_is_away_receipts_say_null_at_once_and_nothing_stays_behind(
    verdicts, start_following, job
):
    settings = verdicts.settings
    bridge = start_following(settings)

    def receipt_of(seq):
        before = len(receipts)
        publish_all(settings.mqtt, [_event(job, seq)])
        wait_until(lambda: len(receipts) > before, what="a receipt")
        return _verdicts_of(receipts)[-1]

    with listening(settings.mqtt, "+/receipts") as receipts:
        assert receipt_of(1) == (1, "accepted", None)
        verdicts.hang.set()
        publish_all(settings.mqtt, [_event(job, 2)])
        wait_until(lambda: "verdicts_away" in bridge.log(), what="a stream that is silent counts as down")
        verdicts.close()
        wait_until(lambda: len(receipts) == 2, what="the receipt of the second")
        assert _verdicts_of(receipts)[-1] == (2, None, None)
        began = time.monotonic()
        assert receipt_of(3) == (3, None, None)
        assert time.monotonic() - began < WAIT_S / 2
        # It may have opened the stream of the server that hung a second time.
        opened = _opened(bridge)
        again = VerdictServer(settings, verdicts.port)
        wait_until(lambda: _opened(bridge) > opened, what="the stream is open again")
        assert receipt_of(4) == (4, "accepted", None)
        again.close()
    assert bridge.stop() == 0
    assert '"acked": 4' in bridge.log()


def test_a_missing_gateway_costs_no_time(backbone_settings):
    stream = VerdictStream(backbone_settings, WAIT_S)
    stream.start()
    answers = []
    stream.ask(Position(0, 1), lambda *answer: answers.append(answer))
    assert answers == [(None, None)]
    stream.close()


def test_a_verdict_may_come_before_kafkas_answer_and_each_question_is_answered_once(
    verdicts, job, start_bridge
):
    stream = VerdictStream(verdicts.settings, WAIT_S)
    stream.start()
    verdicts.wait_follower()
    wait_until(lambda: stream.up, what="an open stream")
    answers = []
    with Publisher(verdicts.settings) as publisher:
        # The stream keeps a verdict that arrives before any caller asks for it.
        other = _append_event(publisher, job)
        wait_until(lambda: verdicts.log.settled.get(tuple(other)), what="settled")
        wait_until(lambda: tuple(other) in stream._early, what="told")
    stream.ask(other, lambda *answer: answers.append(answer))
    assert answers == [("accepted", None)]
    # Never settled: answered when the stream ends, not twice.
    stream.ask(Position(3, 10**9), lambda *answer: answers.append(answer))
    assert len(answers) == 1
    stream.close()
    assert answers == [("accepted", None), (None, None)]


def _append_event(publisher, job):
    topic, payload = _event(job, 1, "started")
    return publisher.append(job_event_record("p", f"p/{topic}", payload, None)).result(20)


def test_the_bridge_stops_in_order_while_receipts_wait_for_their_verdict(
    verdicts, start_following, job, read_topic
):
    settings = with_mqtt(verdicts.settings, receipt_verdict_wait_s=1)
    bridge = start_following(settings)
    verdicts.mute.set()
    with listening(settings.mqtt, "+/receipts") as receipts:
        publish_all(settings.mqtt, [_event(job, n) for n in range(1, 101)])
        # That the broker has them does not say that the bridge has.
        read_topic(101)
        assert bridge.stop(signal.SIGTERM) == 0
        wait_until(lambda: len(receipts) == 100, what="all receipts")
    counts = json.loads(bridge.log().splitlines()[-1])
    assert (counts["received"], counts["acked"]) == (100, 100)


def test_the_token_is_in_no_log(verdicts, start_bridge, job):
    verdicts.settings.operator_token_file.write_text("canary-wrong-token")
    bridge = start_bridge(verdicts.settings)
    wait_until(lambda: "HTTP status 401" in bridge.log(), what="a refusal")
    assert bridge.stop() == 0
    assert "canary" not in bridge.log()


def test_with_the_real_gateway_receipts_carry_its_verdicts(backbone_settings, start_bridge, tmp_path):
    gateway = GatewayProcess(with_mqtt(backbone_settings, receipt_verdict_wait_s=WAIT_S), tmp_path)
    try:
        gateway.wait_ready(60)
        bridge = start_bridge(gateway.settings)
        wait_until(lambda: _opened(bridge), what="the verdict stream")
        with gateway.client() as operator:
            found = register(operator)
        publisher = Job(
            found["job_id"], found["secret"], mqtt=gateway.settings.mqtt, state_dir=tmp_path / "state"
        )
        assert publisher.publish("started", "x").verdict == "accepted"
        assert publisher.publish("completed", "y").verdict == "accepted"
        liar = Job(found["job_id"], "wrong", mqtt=gateway.settings.mqtt, state_dir=tmp_path / "other")
        with pytest.raises(EventRejected, match="bad_signature"):
            liar.publish("started", "x")
    finally:
        gateway.program.stop()
