"""The one producer: what stands in Kafka afterwards, in which order, and what a failure does."""

from __future__ import annotations

import gc
import hashlib
import signal
import threading
import time

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary
from cloudevents.core.formats.json import JSONFormat
from kafka.admin import ConfigResource, ConfigResourceType

from connectors.log import publisher as publisher_module
from connectors.log.publisher import Publisher, RecordRefused
from schemas.log_access.event_topic import admin_client
from schemas.wire.record import OutgoingRecord, Position, oversized, partition_for
from tests.broker_processes import wait_until, watch_threads, with_kafka
from trunkline_agent.errors import BackboneUnreachable


def _record(number: int, job_id: str = "0a1b2c3d", value: bytes | None = None) -> OutgoingRecord:
    body = b'{"n":%d}' % number if value is None else value
    return OutgoingRecord(f"job/{job_id}", f"id-{job_id}-{number}", "mqtt", "unverified", "job.event", body)


def test_a_record_reads_back_with_the_cloudevents_library(backbone_settings, read_topic):
    sent = _record(1)
    with Publisher(backbone_settings) as publisher:
        position = publisher.append(sent).result(10)
    (found,) = read_topic(1)
    assert position == Position(found.partition, found.offset)
    assert found.partition == partition_for(sent.key, backbone_settings.kafka.partitions)
    assert found.key == b"job/0a1b2c3d"
    event = from_binary(KafkaMessage(dict(found.headers), found.key, found.value), JSONFormat())
    assert event.get_id() == "id-0a1b2c3d-1"
    assert event.get_source() == "mqtt/unverified"
    assert event.get_type() == "job.event"
    assert event.get_subject() == "job/0a1b2c3d"
    assert event.get_data() == {"n": 1}


def test_records_of_a_stream_keep_the_order_of_their_appends(backbone_settings, read_topic):
    jobs = ["0a1b2c3d", "11111111", "22222222", "33333333", "44444444"]
    with Publisher(backbone_settings) as publisher:
        appends = [publisher.append(_record(n, job)) for n in range(400) for job in jobs]
        positions = [append.result(20) for append in appends]
    assert len(set(positions)) == 2000
    found = read_topic(2000)
    for job in jobs:
        own = [r.value for r in found if r.key == f"job/{job}".encode()]
        assert own == [b'{"n":%d}' % n for n in range(400)]


def test_several_threads_share_a_publisher(backbone_settings, read_topic):
    with Publisher(backbone_settings) as publisher:

        def work(job_id):
            for number in range(100):
                publisher.append(_record(number, job_id)).result(20)

        threads = [threading.Thread(target=work, args=(f"{n}" * 8,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    found = read_topic(400)
    for n in range(4):
        own = [r.value for r in found if r.key == f"job/{n}{n}{n}{n}{n}{n}{n}{n}".encode()]
        assert own == [b'{"n":%d}' % k for k in range(100)]


@pytest.mark.requirement("CM-02")
def test_an_over_long_body_travels_as_size_hash_and_beginning(backbone_settings, read_topic):
    body = bytes(range(256)) * 4096
    with Publisher(backbone_settings) as publisher:
        publisher.append(_record(1, value=body)).result(10)
    (found,) = read_topic(1)
    assert found.value == body[:1024]
    headers = dict(found.headers)
    assert headers["ce_bodysha256"] == hashlib.sha256(body).hexdigest().encode()
    assert headers["ce_bodysize"] == str(len(body)).encode()


def test_a_record_that_kafka_refuses_for_its_size_says_so_and_goes_through_cut(backbone_settings, read_topic):
    # A door whose limit is set above Kafka's: the record is refused whole and taken cut.
    limits = backbone_settings.limits.model_copy(update={"payload_bytes": 8 * 1024 * 1024})
    settings = backbone_settings.model_copy(update={"limits": limits})
    record = _record(1, value=b"x" * 3_000_000)
    with Publisher(settings) as publisher:
        with pytest.raises(RecordRefused) as caught:
            publisher.append(record).result(10)
        assert caught.value.exit_code == 4
        publisher.append_cut(record).result(10)
    (found,) = read_topic(1)
    assert found.value == oversized(record, 1024).value
    assert dict(found.headers)["ce_bodysize"] == b"3000000"


def test_what_waits_behind_a_record_that_the_broker_refuses_is_not_sent(backbone_settings, read_topic):
    kafka = backbone_settings.kafka
    with Publisher(backbone_settings) as publisher:
        publisher.append(_record(0)).result(10)
        with admin_client(kafka) as admin:  # behind the publisher's back, who thinks that it may be longer
            lower = ConfigResource(ConfigResourceType.TOPIC, kafka.topic, {"max.message.bytes": "20000"})
            admin.alter_configs([lower])
        time.sleep(0.5)  # the controller has it; the log's leader applies it a moment later
        refused = publisher.append(_record(1, value=b"x" * 100_000))
        behind = [publisher.append(_record(number)) for number in (2, 3)]
        with pytest.raises(RecordRefused, match="too large"):
            refused.result(10)
        for append in behind:
            with pytest.raises(BackboneUnreachable, match="too large"):
                append.result(10)
        assert publisher.failed
    assert [r.value for r in read_topic(1)] == [b'{"n":0}']


@pytest.mark.requirement("CM-03")
def test_after_a_failure_nothing_gets_ahead_of_the_failed_record(backbone_settings, kafka_broker, read_topic):
    settings = with_kafka(backbone_settings, delivery_timeout_s=3)
    publisher = Publisher(settings)
    publisher.append(_record(0)).result(10)
    kafka = kafka_broker.process
    with kafka_broker.standing_still():
        first = publisher.append(_record(1))
        # Kafka is back the moment that the first has failed, while the second still has time left.
        first.add_done_callback(lambda _: kafka.send_signal(signal.SIGCONT))
        begun = time.monotonic()
        wait_until(lambda: time.monotonic() - begun > 2.7, what="a gap between the two")
        second = publisher.append(_record(2))
        with pytest.raises(BackboneUnreachable):
            first.result(10)
        # Sooner than by a time-out of its own, which it has 2.7 s after the first.
        wait_until(second.done, 2, "the second fails with the first")
        assert isinstance(second.exception(), BackboneUnreachable)
    assert publisher.failed
    with pytest.raises(BackboneUnreachable):
        publisher.append(_record(3)).result(10)
    publisher.close(5)
    with Publisher(settings) as fresh:
        fresh.append(_record(1)).result(10)
        fresh.append(_record(2)).result(10)
    values = [r.value for r in read_topic(3)]
    # The hung broker may have taken them after all: the second never before the first.
    assert values[0] == b'{"n":0}'
    assert values[-2:] == [b'{"n":1}', b'{"n":2}']
    assert values[1:-2] in ([], [b'{"n":1}'], [b'{"n":1}', b'{"n":2}'])


def test_a_publisher_without_its_topic_says_so_and_leaves_no_thread_behind(backbone_settings, monkeypatch):
    monkeypatch.setattr(publisher_module, "REACH_TIMEOUT_S", 0.3)
    started = watch_threads()
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(BackboneUnreachable, match="no-such-topic"):
                Publisher(with_kafka(backbone_settings, topic="no-such-topic"))
        wait_until(lambda: not started(), 10, "the clients' threads to end")
    finally:
        gc.enable()


def test_waiting_for_an_answer_is_bounded(backbone_settings, kafka_broker):
    publisher = Publisher(backbone_settings)
    publisher.append(_record(0)).result(10)
    with kafka_broker.standing_still(), pytest.raises(BackboneUnreachable, match=r"within 0\.2 s"):
        publisher.append(_record(1)).result(0.2)
    publisher.close()


class _OwingPublisher(Publisher):
    """Its producer never answers."""

    def _send(self, record, answered, promise):
        pass


def test_an_answer_that_the_producer_owes_for_ever_is_an_error_in_time(backbone_settings):
    with _OwingPublisher(with_kafka(backbone_settings, delivery_timeout_s=0.5)) as publisher:
        append = publisher.append(_record(0))
        wait_until(lambda: publisher.failed, 5, "the overdue answer")
        assert publisher.append(_record(1)).done()
        assert append.exception(5) is not None
