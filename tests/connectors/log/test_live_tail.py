"""The tail of the log as the live view reads it, at a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from kafka import KafkaAdminClient, TopicPartition
from kafka.record.default_records import DefaultRecordBatchBuilder

from connectors.log.kafka_libraries import records_between
from connectors.log.log_end import LogEnd
from connectors.log.publisher import Publisher
from connectors.log.topic_consumer import POLL_RECORDS, LogTail, OffsetsGoneError
from schemas.log_access.kafka_clients import client_options
from schemas.settings.settings import KafkaSettings
from schemas.wire.record import NOT_UTF8, Record
from tests.broker_processes import wait_until, watch_threads, with_kafka
from tests.connectors.hub.live.test_live_view import opened
from tests.jobs.topic_load import event
from tests.raw_records import Raw, any_name, append_raw, begin_transaction
from trunkline_agent.errors import BackboneUnreachable

JOB = "0a1b2c3d"
WITHIN_S = 30.0


def polls_until(tail: LogTail, is_enough: Callable[[list[Record]], Any]) -> list[list[Record]]:
    """Return the non-empty polls, up to the first one after which all records together are enough."""
    found: list[list[Record]] = []
    deadline = time.monotonic() + WITHIN_S
    while not is_enough([record for batch in found for record in batch]):
        assert time.monotonic() < deadline, found
        if batch := tail.poll(0.2):
            found.append(batch)
    return found


def test_a_tail_begins_where_it_is_told_gives_a_bounded_number_at_once_and_says_where_the_log_ends(
    backbone_settings,
):
    kafka = backbone_settings.kafka
    with Publisher(backbone_settings) as publisher:
        appends = [publisher.append(event(JOB, number)) for number in range(1, 2 * POLL_RECORDS)]
        first, *_, last = [append.result(20) for append in appends]
    with closing(LogEnd(kafka)) as log_end:
        elsewhere = sum(end for number, end in log_end.offsets(10).items() if number != first.partition)
    started = watch_threads()
    with LogTail(kafka, {first.partition: first.offset + 1}) as tail:
        polls = polls_until(tail, lambda found: len(found) >= last.offset - first.offset + elsewhere)
        assert tail.ends()[first.partition] == tail.reached[first.partition] == last.offset + 1
        assert not tail.poll(0.01)
        assert started()
    wait_until(lambda: not started(), what="the end of the client's threads")
    found = [record for batch in polls for record in batch if record.partition == first.partition]
    assert [record.offset for record in found] == list(range(first.offset + 1, last.offset + 1))
    assert max(map(len, polls)) <= POLL_RECORDS


@pytest.mark.parametrize("ending", ["commit_transaction", "abort_transaction"])
def test_the_end_of_a_transaction_is_no_record_and_holds_up_nobody_who_waits_for_the_logs_end(
    backbone_settings, keyring, ending
):
    with opened(backbone_settings, keyring) as view:
        producer = begin_transaction(backbone_settings.kafka)
        getattr(producer, ending)(20)
        view.catch_up(10)
    with opened(backbone_settings, keyring) as view:
        assert view.next_offsets()[0] == 3


def test_what_another_transaction_has_not_ended_is_read_as_spark_reads_it(backbone_settings):
    producer = begin_transaction(backbone_settings.kafka)
    with LogTail(backbone_settings.kafka, {}) as tail:
        polls_until(tail, lambda found: any(record.key == b"job/0a1b2c3d" for record in found))
    producer.abort_transaction(20)


def test_offsets_that_are_gone_or_not_there_yet_are_told_apart_from_a_kafka_that_is_away(backbone_settings):
    kafka = backbone_settings.kafka
    with Publisher(backbone_settings) as publisher:
        first, last = [publisher.append(event(JOB, number)).result(10) for number in (1, 2)]
    with LogTail(kafka, {last.partition: last.offset + 7}) as tail, pytest.raises(OffsetsGoneError):
        polls_until(tail, lambda found: False)
    with closing(KafkaAdminClient(**client_options(kafka))) as admin:
        admin.delete_records({TopicPartition(kafka.topic, last.partition): last.offset})
    with LogTail(kafka, {first.partition: first.offset}) as tail, pytest.raises(OffsetsGoneError):
        polls_until(tail, lambda found: False)


def test_a_topic_that_is_not_there_is_named(backbone_settings):
    nowhere: KafkaSettings = with_kafka(backbone_settings, topic="nowhere").kafka
    with (
        LogTail(nowhere, {}) as tail,
        pytest.raises(BackboneUnreachable, match=r"nowhere \[\d\]: topic does not exist"),
    ):
        polls_until(tail, lambda found: False)


def test_a_kafka_that_ends_is_told_within_seconds(backbone_settings, kafka_broker):
    with LogTail(backbone_settings.kafka, {}) as tail:
        polls_until(tail, bool)
        with kafka_broker.away():
            began = time.monotonic()
            with pytest.raises(BackboneUnreachable):
                polls_until(tail, lambda found: False)
            assert time.monotonic() - began < WITHIN_S / 2


def test_names_that_are_not_utf_8_are_told_however_often_they_come(backbone_settings):
    """librdkafka's Python client crashes at them when they are asked for as usual; not at the first ones."""
    bad = Raw(b"job/1", b"{}", [("good", b"1"), (any_name(b"x\xff\xfe"), b"2"), ("good", b"3")])
    appended = append_raw(backbone_settings, [bad, Raw(b"job/1", b"{}", [("good", b"1")])] * 2000)
    with LogTail(backbone_settings.kafka, {}) as tail:
        polls = polls_until(tail, lambda found: len(found) > len(appended))
    found = [record.header_names for batch in polls for record in batch if record.key == b"job/1"]
    assert found == [(NOT_UTF8,), ("good",)] * 2000


def test_headers_that_this_client_does_not_give_are_read_as_java_reads_them(backbone_settings, monkeypatch):
    """A value's length of -2, which Java takes for null; more headers than librdkafka takes; none at all."""
    build = DefaultRecordBatchBuilder.build

    def build_odd(batch):
        batch._buffer = batch._buffer.replace(b"\x06odd\x00", b"\x06odd\x03")
        return build(batch)

    monkeypatch.setattr(DefaultRecordBatchBuilder, "build", build_odd)
    good = event(JOB, 1)
    usual = Raw(good.key, good.value, list(good.headers()))
    bare, odd = usual._replace(headers=[]), usual._replace(headers=[*usual.headers, ("odd", b"")])
    many = usual._replace(headers=[*usual.headers, *((f"{n:x}", b"") for n in range(100_001))])
    appended = append_raw(backbone_settings, [usual, bare, odd, many, usual, bare])
    with LogTail(backbone_settings.kafka, {}) as tail:
        polls = polls_until(tail, lambda found: len(found) > len(appended))
    found = {record.offset: record for batch in polls for record in batch if record.key == good.key}
    partition, first, last = appended[0].partition, appended[0].offset, appended[-1].offset
    assert found == records_between(backbone_settings.kafka, partition, first, last)
    assert [len(record.header_names) for record in found.values()] == [7, 0, 8, 100_008, 7, 0]
    assert found[appended[2].offset].header_values[-1] is None
