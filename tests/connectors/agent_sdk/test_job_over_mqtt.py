"""The publisher of job events: numbered, signed, kept until confirmed, told what became of it."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from connectors.plumbing.mqtt_link.payloads import encode_receipt
from connectors.programs.local_stack import free_port
from connectors.tools.conformance.mqtt_proxy import DOWN, PUBACK, PUBLISH, UP, MqttProxy
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import LOOPBACK, program_environment, wait_until, with_mqtt
from tests.mqtt_wire import listening
from trunkline_agent.errors import (
    BackboneUnreachable,
    EventRejected,
    OutboxBusy,
    ReceiptMissing,
    TrunklineError,
    UsageError,
)
from trunkline_agent.jobs.job import Job
from trunkline_agent.outbox.outbox import JobOutbox
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.receipt import LogPosition, Receipt
from trunkline_agent.wire.signing import Signer, signed_bytes

JOB = "0a1b2c3d"
SECRET = "canary-5d1c0e77-secret"


@pytest.fixture
def state_dir(tmp_path):
    return tmp_path / "publisher"


@pytest.fixture
def silent_listener():
    """A TCP port that takes connections and never answers; the list holds them."""
    server = socket.create_server(("127.0.0.1", 0))
    taken = []

    def take():
        while True:
            try:
                taken.append(server.accept()[0])
            except OSError:
                return

    threading.Thread(target=take, daemon=True).start()
    yield server.getsockname()[1], taken
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for connection in taken:
        connection.close()


def _state(state_dir):
    return json.loads((state_dir / f"{JOB}.json").read_text())


def _unreachable(port, **changes):
    defaults = {"publish_attempts": 1, "connect_timeout_s": 0.2, "backoff_base_s": 0.0}
    return with_mqtt(Settings(), port=port, **(defaults | changes))


@pytest.mark.requirement("JE-02")
@pytest.mark.requirement("JE-05")
@pytest.mark.requirement("JE-17")
def test_a_published_event_is_in_the_log_when_publish_returns(
    backbone_settings, start_bridge, read_topic, state_dir
):
    start_bridge()
    publisher = Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir)
    first = publisher.publish("started", "build begins")
    second = publisher.publish("progress", "3 of 10 — größer 𝄞", {"done": 3, "ratio": 0.1, "big": 2**63 - 1})
    records = read_topic(2)
    assert [receipt.seq for receipt in (first, second)] == [1, 2]
    for receipt, record in zip((first, second), records, strict=True):
        assert receipt.position == LogPosition(record.partition, record.offset)
        assert receipt.ce_id == dict(record.headers)["ce_id"].decode()
        event = json.loads(record.value)
        assert set(event) == {"schema_version", "seq", "job_id", "event", "timestamp", "detail", "data"}
        assert Signer(SECRET).verifies(signed_bytes(event), event["data"]["hmac_sig"])
        assert SECRET not in record.value.decode()
    assert _state(state_dir) == {"job_id": JOB, "last_seq": 2, "ended_seq": None, "outbox": []}


@pytest.mark.requirement("JE-01")
def test_only_a_terminal_event_is_retained(backbone_settings, start_bridge, state_dir):
    start_bridge()
    publisher = Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir)
    for event in ("started", "progress", "completed"):
        publisher.publish(event, "")
    with listening(backbone_settings.mqtt, f"{JOB}/events") as found:
        wait_until(lambda: found, what="the retained end")
    assert [json.loads(message.payload)["event"] for message in found] == ["completed"]
    assert found[0].retain


@pytest.mark.requirement("JE-16")
def test_the_state_is_on_disk_for_its_owner_alone(silent_listener, state_dir):
    with pytest.raises(BackboneUnreachable):
        Job(JOB, SECRET, mqtt=_unreachable(silent_listener[0]).mqtt, state_dir=state_dir).publish("started", "")
    path = state_dir / f"{JOB}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    assert SECRET not in path.read_text()
    assert [entry["seq"] for entry in _state(state_dir)["outbox"]] == [1]


@pytest.mark.requirement("JE-16")
def test_a_publisher_killed_before_it_could_send_goes_on_counting_and_sends_the_same(
    backbone_settings, start_bridge, read_topic, silent_listener, state_dir
):
    program = (
        "import os, sys\n"
        "from trunkline_agent.jobs.job import Job\n"
        "from schemas.settings.settings import load_settings\n"
        f"publisher = Job('{JOB}', os.environ['S'], mqtt=load_settings().mqtt, state_dir=sys.argv[1])\n"
        "publisher.publish('started', 'x')\n"
    )
    # The seq is on disk and the connection hangs: the publisher is between fsync and publish.
    environment = program_environment(with_mqtt(backbone_settings, port=silent_listener[0])) | {"S": SECRET}
    command = [sys.executable, "-c", program, str(state_dir)]
    child = subprocess.Popen(command, cwd=PROJECT_ROOT, env=environment)
    wait_until(lambda: silent_listener[1], what="the publisher's connection")
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    (left,) = _state(state_dir)["outbox"]
    start_bridge()
    assert Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir).publish("progress", "y").seq == 2
    records = read_topic(2)
    assert [json.loads(r.value)["seq"] for r in records] == [1, 2]
    assert records[0].value.decode() == left["payload"]


@pytest.mark.requirement("JE-16")
def test_publishers_at_once_never_share_a_seq(backbone_settings, start_bridge, read_topic, state_dir):
    start_bridge()
    seqs, errors = [], []

    def work(number):
        publisher = Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir)
        try:
            for k in range(5):
                seqs.append(publisher.publish("progress", f"{number}-{k}").seq)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert sorted(seqs) == list(range(1, 16))
    assert [json.loads(r.value)["seq"] for r in read_topic(15)] == list(range(1, 16))


def test_a_publisher_does_not_wait_for_another_for_ever(state_dir):
    with (
        JobOutbox(state_dir, JOB, 1),
        pytest.raises(OutboxBusy, match="another process"),
        JobOutbox(state_dir, JOB, 0.1),
    ):
        pass


@pytest.mark.requirement("JE-16")
@pytest.mark.requirement("JE-17")
def test_without_a_receipt_the_event_stays_in_the_outbox_and_goes_first_with_the_same_bytes(
    backbone_settings, start_bridge, read_topic, state_dir
):
    start_bridge().stop()
    impatient = with_mqtt(backbone_settings, receipt_timeout_s=0.3)
    publisher = Job(JOB, SECRET, mqtt=impatient.mqtt, state_dir=state_dir)
    with pytest.raises(ReceiptMissing, match=r"0\.3 s.*outbox.*doctor") as caught:
        publisher.publish("started", "x")
    assert caught.value.exit_code == 5
    start_bridge()
    receipt = Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir).publish("progress", "y")
    assert receipt.seq == 2
    records = read_topic(3)
    assert [json.loads(r.value)["seq"] for r in records] == [1, 1, 2]
    assert records[0].value == records[1].value
    assert dict(records[0].headers)["ce_id"] == dict(records[1].headers)["ce_id"]
    assert _state(state_dir)["outbox"] == []


@pytest.mark.requirement("JE-17")
def test_puback_is_enough_when_no_receipt_is_wanted(backbone_settings, state_dir):
    publisher = Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir)
    receipt = publisher.publish("started", "x", wait_for_receipt=False)
    assert (receipt.seq, receipt.position) == (1, None)
    assert _state(state_dir)["outbox"] == []


@pytest.mark.requirement("JE-17")
def test_a_rejection_is_an_error_with_its_reason_and_forged_receipts_do_not_count(backbone_settings, state_dir):
    topic = f"{backbone_settings.mqtt.topic_prefix}/{JOB}"

    def settle(client, message):
        seq = json.loads(message.payload)["seq"]
        good = content_id(message.topic.encode(), message.payload)
        for receipt in (
            Receipt("f" * 64, seq, "accepted"),
            Receipt(good[:-1], seq, "accepted"),
            Receipt(good, seq, "rejected", "bad_signature"),
        ):
            client.publish(f"{topic}/receipts", encode_receipt(receipt), qos=1)
        client.publish(f"{topic}/receipts", b"\xff no receipt", qos=1)

    with listening(backbone_settings.mqtt, f"{JOB}/events", settle):
        publisher = Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir)
        for event in ("progress", "completed"):
            with pytest.raises(EventRejected, match="bad_signature") as caught:
                publisher.publish(event, "x")
            assert caught.value.exit_code == 4
            assert caught.value.receipt.reason == "bad_signature"
    # The publisher does not send settled events again, and a rejected end has not ended the job.
    assert _state(state_dir) == {"job_id": JOB, "last_seq": 2, "ended_seq": None, "outbox": []}


@pytest.mark.long
@pytest.mark.requirement("JE-15")
def test_a_broker_that_never_answers_is_tried_three_times_with_growing_pauses(silent_listener, state_dir):
    port, taken = silent_listener
    settings = _unreachable(port, publish_attempts=3, connect_timeout_s=0.4, backoff_base_s=0.2)
    begun = time.monotonic()
    with pytest.raises(BackboneUnreachable, match=r"no CONNACK in time \(3 attempts\)"):
        Job(JOB, SECRET, mqtt=settings.mqtt, state_dir=state_dir).publish("started", "x")
    elapsed_s = time.monotonic() - begun
    wait_until(lambda: len(taken) == 3, 20, "three connections")
    # No attempt waits for the ten seconds of the default.
    assert 3 * 0.4 + 0.2 + 0.4 <= elapsed_s < 8


@pytest.mark.long
@pytest.mark.requirement("JE-15")
def test_the_pauses_have_an_upper_bound(state_dir):
    settings = _unreachable(free_port(), publish_attempts=8, backoff_base_s=0.1, backoff_max_s=0.15)
    begun = time.monotonic()
    with pytest.raises(BackboneUnreachable, match="8 attempts"):
        Job(JOB, SECRET, mqtt=settings.mqtt, state_dir=state_dir).publish("started", "x")
    # Doubled each time, seven pauses are 12.7 s.
    assert 0.1 + 6 * 0.15 <= time.monotonic() - begun < 6


@pytest.mark.requirement("JE-15")
def test_the_timing_rules_are_the_defaults_of_the_settings():
    mqtt = Settings().mqtt
    assert (mqtt.connect_timeout_s, mqtt.puback_timeout_s, mqtt.publish_attempts) == (10, 5, 3)
    assert (mqtt.backoff_base_s, mqtt.backoff_max_s) == (0.5, 8)


@pytest.mark.requirement("JE-17")
def test_a_receipt_waits_a_second_for_its_verdict_unless_set_otherwise():
    assert Settings().mqtt.receipt_verdict_wait_s == 1


@pytest.mark.requirement("JE-15")
@pytest.mark.requirement("JE-16")
def test_without_puback_each_attempt_is_a_new_connection_with_the_same_bytes(
    backbone_settings, mosquitto_broker, state_dir
):
    proxy = MqttProxy(LOOPBACK, mosquitto_broker.port)
    try:
        proxy.hold(DOWN, PUBACK)
        settings = with_mqtt(backbone_settings, port=proxy.port, puback_timeout_s=0.4, publish_attempts=2)
        with listening(backbone_settings.mqtt, f"{JOB}/events") as found:
            with pytest.raises(BackboneUnreachable, match="no PUBACK in time"):
                Job(JOB, SECRET, mqtt=settings.mqtt, state_dir=state_dir).publish(
                    "started", "x", wait_for_receipt=False
                )
            wait_until(lambda: len(found) == 2, what="both attempts")
        assert found[0].payload == found[1].payload
        assert [proxy.count(UP, PUBLISH, link) for link in (0, 1)] == [1, 1]
    finally:
        proxy.close()


@pytest.mark.requirement("JE-04")
@pytest.mark.parametrize(
    ("detail", "pattern"),
    [
        ("wrote /home/ann/x", "posix_path"),
        ("API_KEY=abc", "environment_assignment"),
        ("password: hunter2", "password_or_token"),
        (r"C:\Users\x", "windows_path"),
    ],
)
def test_an_unsafe_detail_is_not_sent_and_the_pattern_is_named(detail, pattern, state_dir):
    with pytest.raises(UsageError, match=pattern):
        Job(JOB, SECRET, mqtt=_unreachable(free_port()).mqtt, state_dir=state_dir).publish("progress", detail)
    assert not state_dir.exists()


@pytest.mark.requirement("JE-02")
@pytest.mark.requirement("JE-03")
@pytest.mark.requirement("CM-02")
@pytest.mark.parametrize(
    ("event", "detail", "data", "why"),
    [
        ("finished", "x", None, "event: expected"),
        ("progress", "x" * 501, None, "at most 500"),
        ("progress", "line\nbreak", None, "control character"),
        ("permission_required", " ", None, "must name the permission"),
        ("progress", "x", {"auth_token": "t"}, r"data\.auth_token"),
        ("progress", "x", {"hmac_sig": "0"}, r"data\.hmac_sig"),
        ("progress", "x", {"n": float("nan")}, "not JSON"),
        ("progress", "x", {"n": 2**63}, "64 bits"),
        ("progress", "x", {"n": "\ud800"}, "not JSON"),
        ("progress", "x", {"n": object()}, "not JSON"),
        ("progress", "x", {"n": "y" * 2_000_000}, "at most 1048576"),
        ("progress", "x", {"key": SECRET}, "own secret"),
    ],
)
def test_an_event_that_must_not_be_sent_takes_no_seq(event, detail, data, why, state_dir):
    with pytest.raises(UsageError, match=why) as caught:
        Job(JOB, SECRET, mqtt=_unreachable(free_port()).mqtt, state_dir=state_dir).publish(event, detail, data)
    assert SECRET not in str(caught.value)
    assert not (state_dir / f"{JOB}.json").exists()


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("job_id", ["", "0A1B2C3D", "../../ab", "+", "#", "0a1b2c3d\n", "0a1b2c3d/x", "jöb"])
def test_what_is_no_job_id_reaches_no_topic_and_no_file(job_id, state_dir):
    with pytest.raises(UsageError, match="not a job id"):
        Job(job_id, SECRET, mqtt=Settings().mqtt, state_dir=state_dir)
    with pytest.raises(UsageError, match="not a job id"):
        JobOutbox(state_dir, job_id, 1)
    assert not state_dir.exists()


@pytest.mark.requirement("JE-03")
def test_nothing_follows_the_end_but_the_end_itself_until_it_is_confirmed(backbone_settings, state_dir):
    lonely = with_mqtt(backbone_settings, receipt_timeout_s=0.1)
    publisher = Job(JOB, SECRET, mqtt=lonely.mqtt, state_dir=state_dir)
    with pytest.raises(ReceiptMissing):
        publisher.publish("completed", "done", {"n": 1})
    with pytest.raises(UsageError, match="has ended with seq 1"):
        publisher.publish("progress", "more")
    with pytest.raises(UsageError, match="has ended with seq 1"):
        publisher.publish("completed", "done", {"n": 2})
    receipt = publisher.publish("completed", "done", {"n": 1}, wait_for_receipt=False)
    assert receipt.seq == 1
    with pytest.raises(UsageError, match="has ended"):
        publisher.publish("completed", "done", {"n": 1})
    assert _state(state_dir)["last_seq"] == 1


@pytest.mark.requirement("JE-03")
def test_started_is_the_first_event_or_none(backbone_settings, state_dir):
    publisher = Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir)
    publisher.publish("progress", "x", wait_for_receipt=False)
    with pytest.raises(UsageError, match="'started' is the first event"):
        publisher.publish("started", "x", wait_for_receipt=False)


def test_resend_sends_only_what_is_left(backbone_settings, state_dir):
    with pytest.raises(ReceiptMissing):
        Job(
            JOB, SECRET, mqtt=with_mqtt(backbone_settings, receipt_timeout_s=0.1).mqtt, state_dir=state_dir
        ).publish("progress", "x")
    publisher = Job(JOB, SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir)
    assert [publisher.resend(wait_for_receipt=False) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"job_id":"ffffffff","last_seq":3}', b'{"job_id":3}', b"\xff"]
)
def test_a_damaged_state_is_an_error_and_not_a_new_count(content, state_dir):
    state_dir.mkdir()
    (state_dir / f"{JOB}.json").write_bytes(content)
    with pytest.raises(TrunklineError, match="not the state of job"):
        Job(JOB, SECRET, mqtt=_unreachable(free_port()).mqtt, state_dir=state_dir).publish("progress", "x")
    assert (state_dir / f"{JOB}.json").read_bytes() == content


def test_a_state_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrunklineError, match="cannot keep"):
        Job(JOB, SECRET, mqtt=_unreachable(free_port()).mqtt, state_dir=tmp_path / "file").publish(
            "progress", "x"
        )
