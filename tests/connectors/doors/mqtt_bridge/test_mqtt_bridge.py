"""The bridge against real brokers: which record a message becomes, and what comes back (JE-17, JE-18)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType
from pydantic import SecretStr

from connectors.programs.local_stack import free_port
from schemas.log_access.kafka_clients import client_options
from tests.broker_processes import wait_until, with_kafka, with_mqtt
from tests.mqtt_wire import listening, publish_all
from trunkline_agent.wire.ids import content_id

JOB = "0a1b2c3d"
EVENTS = f"{JOB}/events"


def _headers(record):
    return {name: value.decode() for name, value in record.headers}


@pytest.mark.requirement("JE-01")
def test_a_message_becomes_a_record_under_its_job_with_its_bytes_as_they_came(
    backbone_settings, start_bridge, read_topic
):
    start_bridge()
    payload = b'{"seq": 1,  "odd":"spacing"}'
    publish_all(backbone_settings.mqtt, [(EVENTS, payload)])
    (record,) = read_topic(1)
    assert record.key == f"job/{JOB}".encode()
    assert record.value == payload
    headers = _headers(record)
    topic = f"{backbone_settings.mqtt.topic_prefix}/{EVENTS}".encode()
    assert headers["ce_id"] == content_id(topic, payload)
    assert headers["ce_source"] == "mqtt/unverified"
    assert headers["ce_type"] == "job.event"
    assert headers["ce_subject"] == f"job/{JOB}"
    assert "traceparent" not in headers


@pytest.mark.requirement("CM-01")
def test_what_is_under_a_bad_id_goes_to_the_refused_stream(backbone_settings, start_bridge, read_topic):
    bridge = start_bridge()
    bad = ["0A1B2C3D", "0a1b2c3", "0a1b2c3d4", "..", "", "0a1b2c3d ", "x" * 300, "jöb", "0a1b2c3g"]
    publish_all(backbone_settings.mqtt, [(f"{name}/events", b"{}") for name in bad])
    publish_all(backbone_settings.mqtt, [(EVENTS, b"last")])
    records = read_topic(len(bad) + 1)
    refused = [r for r in records if r.key == b"refused/mqtt"]
    assert len(refused) == len(bad)
    assert len({_headers(r)["ce_id"] for r in refused}) == len(bad)
    assert [r.value for r in records if r.key == f"job/{JOB}".encode()] == [b"last"]
    assert bridge.stop() == 0
    assert f'"refused": {len(bad)}' in bridge.log()


@pytest.mark.requirement("CM-02")
def test_payloads_of_any_bytes_survive_and_an_over_long_one_is_cut(backbone_settings, start_bridge, read_topic):
    start_bridge()
    large = os.urandom(1024) + b"\x00" * (10 * 1024 * 1024)
    odd = [b"", b"\xff\xfe\x00\x80", b'{"seq": ' + b"[" * 5000, b"\xed\xa0\x80", bytes(range(256))]
    publish_all(backbone_settings.mqtt, [(EVENTS, payload) for payload in [*odd, large, b"after"]])
    records = read_topic(len(odd) + 2)
    assert [r.value for r in records] == [*odd, large[:1024], b"after"]
    headers = _headers(records[len(odd)])
    assert headers["ce_bodysize"] == str(len(large))
    assert headers["ce_bodysha256"] == hashlib.sha256(large).hexdigest()
    topic = f"{backbone_settings.mqtt.topic_prefix}/{EVENTS}".encode()
    assert headers["ce_id"] == content_id(topic, large)


GOOD_TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("value", "carried"),
    [
        (GOOD_TRACE, True),
        (GOOD_TRACE.upper(), False),
        ("ff" + GOOD_TRACE[2:], False),
        ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01", False),
        (GOOD_TRACE + "-more", False),
        ("", False),
    ],
)
def test_a_well_formed_traceparent_is_carried_on(value, carried):
    from types import SimpleNamespace

    from trunkline_agent.mqtt.mqtt_client import well_formed_traceparent

    properties = SimpleNamespace(UserProperty=[("other", "x"), ("traceparent", value)])
    assert well_formed_traceparent(properties) == (value if carried else None)


def test_the_traceparent_of_an_mqtt_user_property_stands_in_the_record(
    backbone_settings, start_bridge, read_topic
):
    start_bridge()
    properties = [("traceparent", GOOD_TRACE)]
    publish_all(backbone_settings.mqtt, [(EVENTS, b"{}")], user_properties=properties)
    (record,) = read_topic(1)
    assert _headers(record)["traceparent"] == GOOD_TRACE


@pytest.mark.requirement("JE-17")
def test_a_receipt_tells_the_id_the_seq_and_the_position_in_the_log(
    backbone_settings, start_bridge, read_topic
):
    start_bridge()
    payloads = [b'{"seq":7,"more":[1,2]}', b"no json", b'{"seq":"7"}']
    with listening(backbone_settings.mqtt, "+/receipts") as receipts:
        messages = [(EVENTS, payload) for payload in payloads]
        publish_all(backbone_settings.mqtt, [("NOT-A-JOB/events", b"{}"), *messages])
        wait_until(lambda: len(receipts) == len(payloads), what="three receipts")
    records = {_headers(r)["ce_id"]: r for r in read_topic(4)}
    topic = f"{backbone_settings.mqtt.topic_prefix}/{EVENTS}".encode()
    for payload, message, seq in zip(payloads, receipts, [7, None, None], strict=True):
        assert message.topic.endswith(f"/{JOB}/receipts")
        receipt = json.loads(message.payload)
        record = records[content_id(topic, payload)]
        assert receipt == {
            "ce_id": content_id(topic, payload),
            "seq": seq,
            "verdict": None,
            "reason": None,
            "position": {"partition": record.partition, "offset": record.offset},
        }


@pytest.mark.requirement("JE-18")
def test_a_record_that_kafka_refuses_does_not_block_the_stream(backbone_settings, start_bridge, read_topic):
    # It looks at the topic before it goes on, and would not with a limit that is too low.
    bridge = start_bridge(with_mqtt(backbone_settings, backoff_base_s=3, backoff_max_s=3))
    kafka = backbone_settings.kafka
    admin = KafkaAdminClient(**client_options(kafka))
    try:
        # Somebody lowers the limit behind our back, and puts it right again while the bridge recovers.
        resource = {"max.message.bytes": "20000"}
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, kafka.topic, resource)])
        time.sleep(0.5)  # the controller has it; the log's leader applies it a moment later
        publish_all(backbone_settings.mqtt, [(EVENTS, b"first"), (EVENTS, b"x" * 100_000), (EVENTS, b"last")])
        # The record behind the refused one may fail first, because the publisher keeps their order.
        wait_until(lambda: "Kafka did not take a record" in bridge.log(), what="the refusal")
        resource = {"max.message.bytes": str(kafka.record_limit_bytes)}
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, kafka.topic, resource)])
    finally:
        admin.close()
    wait_until(lambda: read_topic(1)[-1].value == b"last", what="the message behind the refused one")
    first_seen = list(dict.fromkeys(r.value for r in read_topic(3)))
    assert first_seen == [b"first", b"x" * 1024, b"last"]


@pytest.mark.requirement("JE-18")
def test_the_bridge_ends_in_order_at_sigterm_and_nothing_comes_twice(
    backbone_settings, start_bridge, read_topic
):
    bridge = start_bridge()
    messages = [(EVENTS, b"%d" % n) for n in range(300)]
    publish_all(backbone_settings.mqtt, messages)
    read_topic(300)
    assert bridge.stop(signal.SIGTERM) == 0
    assert '"acked": 300' in bridge.log()
    publish_all(backbone_settings.mqtt, [(EVENTS, b"while down")])
    start_bridge()
    assert [r.value for r in read_topic(301)] == [*(p for _, p in messages), b"while down"]


def test_the_bridge_refuses_to_start_on_another_partition_count(backbone_settings, start_bridge):
    bridge = start_bridge(with_kafka(backbone_settings, partitions=7), wait=False)
    assert bridge.process.wait(30) == 1
    assert "kafka.partitions is 7" in bridge.log()
    assert not bridge.ready_file.exists()


@pytest.mark.requirement("CM-05")
def test_no_password_in_the_log_or_the_process_list_while_nothing_is_reachable(backbone_settings, start_bridge):
    canary = "canary-9f2e71c04b"
    settings = with_mqtt(backbone_settings, port=free_port(), username="bridge", password=SecretStr(canary))
    bridge = start_bridge(settings, wait=False)
    wait_until(lambda: bridge.log().count("unreachable") >= 2, what="two attempts")
    assert bridge.process.poll() is None
    pid = bridge.process.pid
    assert canary.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert bridge.stop() == 0
    assert canary not in bridge.log()
    assert all(json.loads(line)["level"] for line in bridge.log().splitlines())
