"""One read of the log for two readers: the second one gets the newest records from the first (ST-92)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing

import pytest

from connectors.log import shared_records
from connectors.log.shared_records import SharedRecords
from connectors.log.topic_consumer import GroupTail, LogTail
from schemas.wire.record import Record
from tests.broker_processes import wait_until
from tests.jobs.topic_load import append_all, event

pytestmark = pytest.mark.requirement("ST-92")

JOBS = [f"{number:08x}" for number in range(12)]
WITHIN_S = 30.0


class Readers:
    """Two readers of a topic: one of all partitions, and a member of a group that gets records from it."""

    def __init__(self, settings) -> None:
        self.settings = settings
        self.shared = SharedRecords()
        self.first = LogTail(settings.kafka, {})
        self.read: list[Record] = []
        self.shared.begin(dict.fromkeys(range(settings.kafka.partitions), 0))
        self.found: list[Record] = []

    def pass_on(self) -> None:
        records = self.first.poll(0.5)
        self.read += records
        self.shared.offer(records)

    def append(self, seq: int) -> None:
        append_all(self.settings, [event(job, seq) for job in JOBS])
        expected = len(self.read) + len(JOBS)
        wait_until(lambda: self.pass_on() or len(self.read) >= expected, WITHIN_S, "the records")

    def take(self, tail: GroupTail, most: int = 1000) -> bool:
        """Let the member poll. Return whether it has had all that was read."""
        self.found += tail.poll(0.2, most)
        return {*places(self.found)} >= {*places(self.read)}


def places(records: Iterable[Record]) -> list[tuple[int, int]]:
    return [(record.partition, record.offset) for record in records]


def joined(tail: GroupTail) -> bool:
    return bool(tail._places) and tail._joined == tail._places.keys()


@pytest.fixture
def readers(backbone_settings):
    found = Readers(backbone_settings)
    with closing(found.first):
        yield found


def of_order(records: Iterable[Record]) -> bool:
    last: dict[int, int] = {}
    for record in records:
        if record.offset <= last.get(record.partition, -1):
            return False
        last[record.partition] = record.offset
    return True


def test_a_member_gets_the_old_records_from_kafka_and_the_new_ones_from_the_other_reader(
    readers, monkeypatch
) -> None:
    group = f"group-{readers.settings.kafka.topic}"
    readers.append(1)  # before anybody wants them: not kept
    with closing(GroupTail(readers.settings.kafka, group, readers.shared)) as tail:
        wait_until(lambda: readers.take(tail), WITHIN_S, "the old ones")
        for seq in range(2, 6):
            readers.append(seq)
            wait_until(lambda: readers.take(tail), WITHIN_S, "new ones")
        wait_until(lambda: readers.take(tail) and joined(tail), WITHIN_S, "one read of each partition")
        messages, fetched = tail.messages, list[object]()

        def watched(*given):
            found = messages(*given)
            fetched.extend(found)
            return found

        monkeypatch.setattr(tail, "messages", watched)
        readers.append(6)
        assert readers.take(tail)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            readers.take(tail)
        assert not fetched, "Kafka is asked for nothing a second time"
        assert sorted(places(readers.found)) == sorted(places(readers.read)) and of_order(readers.found)


def test_a_member_that_is_slow_reads_from_kafka_what_was_forgotten(readers, monkeypatch) -> None:
    monkeypatch.setattr(shared_records, "_RECORDS_MOST", 20)
    with closing(GroupTail(readers.settings.kafka, "slow", readers.shared)) as tail:
        readers.append(1)
        wait_until(lambda: readers.take(tail) and joined(tail), WITHIN_S, "one read of each partition")
        for seq in range(2, 7):
            readers.append(seq)
        assert sum(map(len, readers.shared._waiting.values())) <= 20
        wait_until(lambda: readers.take(tail, 3), WITHIN_S, "all")
        readers.append(7)
        wait_until(lambda: readers.take(tail), WITHIN_S, "the last")
        assert sorted(places(readers.found)) == sorted(places(readers.read)) and of_order(readers.found)


def test_a_member_that_loses_and_gets_partitions_passes_no_record_over(readers) -> None:
    kafka = readers.settings.kafka
    readers.append(1)
    with closing(GroupTail(kafka, "moving", readers.shared)) as tail:
        wait_until(lambda: readers.take(tail) and joined(tail), WITHIN_S, "one read of each partition")
        tail.commit(readers.found)
        for seq in range(2, 6, 2):
            with closing(GroupTail(kafka, "moving")) as other:
                taken: list[Record] = []
                wait_until(
                    lambda other=other, taken=taken: (
                        (readers.take(tail) and False)
                        or taken.extend(other.poll(0.2, 1000))
                        or 0 < len(tail._places) < kafka.partitions
                    ),
                    WITHIN_S,
                    "partitions for both",
                )
                assert not tail._done, "a commit would undo that of the next owner"
                readers.append(seq)
                readers.take(tail)
            tail.commit(readers.found)
            tail.commit(readers.found, at_once=False)
            assert tail._done
            readers.append(seq + 1)
            wait_until(
                lambda: readers.take(tail),
                WITHIN_S,
                "all",
            )


def test_what_waits_is_bounded_in_bytes_as_in_number(monkeypatch) -> None:
    monkeypatch.setattr(shared_records, "_BYTES_MOST", 1000)
    shared = SharedRecords()
    shared.begin({0: 0, 1: 0})
    shared.want([0])
    shared.offer([Record("t", 0, 0, 0, b"k", b"x" * 900, (), ())])
    assert shared.has(0, 0)
    shared.offer([Record("t", 0, 1, 0, b"k", b"x" * 200, (), ())])
    assert not shared.has(0, 1) and shared.has(0, 2) and not shared.take({0: 0}, 10)
    shared.offer([Record("t", 0, 2, 0, b"k", None, ("a", "b"), (b"x" * 1100, None))])
    assert not shared.has(0, 2) and shared.has(0, 3)


def test_a_commit_that_can_wait_is_made_with_a_later_one(readers) -> None:
    readers.append(1)
    with closing(GroupTail(readers.settings.kafka, "later", readers.shared)) as tail:
        wait_until(lambda: readers.take(tail), WITHIN_S, "the records")
        tail.commit(readers.found[:1])
        tail.commit(readers.found[1:], at_once=False)
        committed = {one.partition: one.offset for one in tail.client.committed(tail.client.assignment())}
        last = {record.partition: record.offset + 1 for record in readers.found}
        assert committed != last
        time.sleep(1.1)
        tail.commit((), at_once=False)
        committed = {one.partition: one.offset for one in tail.client.committed(tail.client.assignment())}
        assert {number: committed[number] for number in last} == last
