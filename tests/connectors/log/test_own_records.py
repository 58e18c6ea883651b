"""Records of this process that count as stored when a reader of the log has them (ST-88)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.log import publisher as publishers
from connectors.log.publisher import Publisher, RecordRefused
from connectors.log.shared_records import OwnRecord, OwnRecords
from connectors.log.topic_consumer import LogTail
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord, Position, Record
from tests.broker_processes import wait_until

pytestmark = pytest.mark.requirement("ST-88")


def outgoing(number: int, job_id: str = "0a1b2c3d", value: bytes | None = None) -> OutgoingRecord:
    """A record of a job's stream."""
    body = b'{"n":%d}' % number if value is None else value
    return OutgoingRecord(f"job/{job_id}", f"id-{number}", "mqtt", "unverified", "job.event", body)


def as_read(partition: int, value: bytes, *headers: bytes) -> Record:
    """A record as a reader gets it."""
    names = tuple(f"h{number}" for number, _ in enumerate(headers))
    return Record("t", partition, 0, 0, b"k", value, names, headers)


@contextmanager
def reader(settings: Settings, own: OwnRecords, seen: list[Record]) -> Iterator[threading.Event]:
    """A thread that reads the log while the event is set, and hands each record of ours over."""
    reads, ends = threading.Event(), threading.Event()

    def read() -> None:
        with LogTail(settings.kafka, {}) as tail:
            while not ends.is_set():
                if not reads.wait(0.05):
                    continue
                for record in tail.poll(0.1):
                    seen.append(record)
                    if (sent := own.seen(record)) is not None:
                        at = Position(record.partition, record.offset)
                        sent.settle(SimpleNamespace(position=at, value=record.value))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield reads
    finally:
        ends.set()
        reads.set()
        thread.join(20)


def test_a_record_is_done_when_the_reader_has_it_and_not_when_kafka_has(
    backbone_settings: Settings, read_topic: Any
) -> None:
    own, seen, found = OwnRecords(), list[Record](), list[Any]()
    with reader(backbone_settings, own, seen) as reads, Publisher(backbone_settings, own=own) as publisher:
        for number in range(100):
            publisher.send(outgoing(number, f"{number % 5:08x}"), found.append)
        append = publisher.append(outgoing(100))
        read_topic(101)
        assert found == [] and not append.done()
        reads.set()
        position = append.result(20)
        wait_until(lambda: len(found) == 100, what="all records")
        wait_until(lambda: publisher._outstanding_bytes == 0, what="room for others")
    assert {one.value for one in found} == {b'{"n":%d}' % number for number in range(100)}
    (last,) = (one for one in seen if one.value == b'{"n":100}')
    assert position == Position(last.partition, last.offset)


def test_equal_records_of_two_publishers_are_told_apart_by_their_headers() -> None:
    ours, theirs, found = OwnRecords(), OwnRecords(), list[str]()
    for own, name in ((ours, "ours"), (theirs, "theirs")):
        sent = OwnRecord(lambda _, name=name: found.append(name), lambda: None)
        own.expect(0, sent, (b"id", name.encode()), b"value")
    for own in (ours, theirs):
        if (sent := own.seen(as_read(0, b"value", b"id", b"theirs"))) is not None:
            sent.settle(None)
    assert found == ["theirs"]
    assert ours.seen(as_read(1, b"value", b"id", b"ours")) is None  # of another partition
    assert ours.seen(as_read(0, b"value", b"id", b"ours")) is not None


def test_a_record_that_failed_holds_up_none_behind_it_and_is_done_once() -> None:
    own, found, all_sent = OwnRecords(), list[Any](), list[OwnRecord]()
    for number in range(3):
        all_sent.append(OwnRecord(lambda said, number=number: found.append((number, said)), lambda: None))
        own.expect(0, all_sent[-1], (b"%d" % number,), b"value")
    for sent in all_sent[:2]:
        sent.set_exception(ValueError())
        sent.set_exception(ValueError())
    # It was stored although it failed; nobody is told of it any more.
    assert own.seen(as_read(0, b"value", b"0")) is None
    last = own.seen(as_read(0, b"value", b"2"))
    assert last is not None
    last.settle("settled")
    last.set_exception(ValueError())
    assert [number for number, _ in found] == [0, 1, 2] and found[2][1] == "settled"


def test_a_record_that_kafka_refuses_is_an_error_and_the_next_one_comes(backbone_settings: Settings) -> None:
    own, seen, found = OwnRecords(), list[Record](), list[Any]()
    limit = backbone_settings.kafka.record_limit_bytes
    with reader(backbone_settings, own, seen) as reads:
        reads.set()
        with Publisher(backbone_settings, own=own, cut_beyond=2 * limit) as publisher:
            publisher.send(outgoing(1, value=b"x" * (limit + 1)), found.append)
            wait_until(lambda: found, what="the refusal")
            assert isinstance(found[0], RecordRefused)
            assert publisher.append(outgoing(2)).result(20) is not None


def test_records_that_do_not_come_back_in_time_are_errors_and_the_publisher_has_failed(
    backbone_settings: Settings,
) -> None:
    own, found = OwnRecords(), list[Any]()
    kafka = backbone_settings.kafka.model_copy(update={"delivery_timeout_s": 1.0})
    settings = backbone_settings.model_copy(update={"kafka": kafka})
    with Publisher(settings, own=own) as publisher:
        publisher.send(outgoing(1), found.append)
        wait_until(lambda: publisher.failed and found, what="the failure")
    assert isinstance(found[0], Exception)


def test_what_is_told_that_its_record_was_refused_may_send_the_next_one(backbone_settings: Settings) -> None:
    found, limit = list[Any](), backbone_settings.kafka.record_limit_bytes
    with Publisher(backbone_settings, own=OwnRecords(), cut_beyond=2 * limit) as publisher:

        def refused(error: Any) -> None:
            found.append(error)
            if len(found) < 3:
                publisher.send(outgoing(len(found), value=b"x" * (limit + 1)), refused)

        # As a thread of its own, so that a deadlock is a failure of this test alone.
        sending = threading.Thread(target=publisher.send, args=(outgoing(0, value=b"x" * (limit + 1)), refused))
        sending.daemon = True
        sending.start()
        sending.join(10)
        assert not sending.is_alive() and [type(one) for one in found] == [RecordRefused] * 3


def test_a_call_that_must_not_block_waits_for_no_room_and_takes_none_from_those_that_do(
    backbone_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers, "OUTSTANDING_LIMIT_BYTES", 1_000_000)
    found, large = list[Any](), b"x" * 600_000
    kafka = backbone_settings.kafka.model_copy(update={"delivery_timeout_s": 3.0})
    settings = backbone_settings.model_copy(update={"kafka": kafka})
    with Publisher(settings, own=OwnRecords(), cut_beyond=1_000_000) as publisher:
        publisher.send(outgoing(1, value=large), found.append)
        waiting = threading.Thread(target=publisher.send, args=(outgoing(2, value=large), found.append))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        began = time.monotonic()
        for value in (large, b"{}"):  # the small one would take the room of the one that waits
            assert not publisher.send(outgoing(3, value=value), found.append, may_block=False)
        assert time.monotonic() - began < 1
        waiting.join(20)


@pytest.mark.requirement("ST-98")
def test_records_that_failed_are_forgotten_also_while_none_comes_back() -> None:
    own = OwnRecords()
    for number in range(1000):
        sent = OwnRecord(lambda _: None, lambda: None)
        own.expect(0, sent, (b"%d" % number,), b"value")
        sent.set_exception(ValueError())
    assert len(own._waiting[0]) == 1
