"""Tests of our fixes for kafka-python, at a real broker: each fails without its fix."""

from __future__ import annotations

import psutil
from kafka import KafkaConsumer, TopicPartition
from kafka.net.inet import KafkaNetSocket

from connectors.log.kafka_libraries import repair_kafka_client
from schemas.log_access.event_topic import topic_reader
from schemas.log_access.kafka_clients import client_options
from tests.broker_processes import wait_until
from tests.raw_records import Raw, any_name, append_raw


def test_a_record_with_a_name_that_is_not_utf_8_is_read_and_so_is_what_follows_it(backbone_settings):
    bad = Raw(b"job/1", b"{}", [(any_name(b"x\xff\xfe"), b"1")])
    append_raw(backbone_settings, [bad, Raw(b"job/1", b"last", [])])
    repair_kafka_client()
    with topic_reader(backbone_settings.kafka) as consumer:
        found = []
        wait_until(
            lambda: (
                found.extend(one for batch in consumer.poll(timeout_ms=200).values() for one in batch)
                or any(one.value == b"last" for one in found)
            ),
            what="the record behind it",
        )
    assert [("x\ufffd\ufffd", b"1")] in [one.headers for one in found]


def test_attempts_to_reach_a_kafka_that_is_away_leave_nothing_open(
    backbone_settings, kafka_broker, monkeypatch
):
    attempts = []
    connect = KafkaNetSocket.connect_ex
    monkeypatch.setattr(
        KafkaNetSocket, "connect_ex", lambda *given: attempts.append(given[0]) or connect(*given)
    )
    kafka, process = backbone_settings.kafka, psutil.Process()
    repair_kafka_client()
    consumer = KafkaConsumer(group_id=None, reconnect_backoff_max_ms=100, **client_options(kafka))
    try:
        consumer.assign([TopicPartition(kafka.topic, 0)])
        consumer.poll(timeout_ms=1000)
        with kafka_broker.away():
            consumer.poll(timeout_ms=1000)
            fewest = process.num_fds()
            attempts.clear()
            wait_until(lambda: consumer.poll(timeout_ms=200) or len(attempts) > 20, 40, "attempts to connect")
            attempts.clear()
            assert process.num_fds() < fewest + 10
    finally:
        consumer.close(autocommit=False)
