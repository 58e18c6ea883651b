"""The reactor's part of the log, as a member of its group, at a real broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.admin import MemberToRemove
from structlog.testing import capture_logs

from connectors.log import topic_consumer
from connectors.log.publisher import Publisher
from connectors.log.topic_consumer import GroupTail
from schemas.log_access.kafka_clients import client_options
from schemas.wire.record import NOT_UTF8, Record, partition_for
from tests.broker_processes import wait_until, watch_threads, with_kafka
from tests.jobs.topic_load import append_all, event
from tests.raw_records import Raw, any_name, append_raw
from trunkline_agent.errors import BackboneUnreachable

JOB = "0a1b2c3d"
MOST = 3
WITHIN_S = 30.0


@pytest.fixture
def group(backbone_settings) -> str:
    """A group of this test's own."""
    return f"group-{backbone_settings.kafka.topic}"


@pytest.fixture
def appended(backbone_settings) -> int:
    """Seven records of one job, which is one partition's."""
    return append_all(backbone_settings, [event(JOB, number) for number in range(1, 8)])


def of_the_job(tail: GroupTail) -> Iterator[list[Record]]:
    """Yield the job's records of each poll that has some; fail after WITHIN_S."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if found := [record for record in tail.poll(0.2, MOST) if record.key == f"job/{JOB}".encode()]:
            yield found
    raise AssertionError("nothing more came")


def test_a_new_group_begins_with_the_first_record_and_the_next_member_where_the_last_has_committed(
    backbone_settings, group, appended
):
    started = watch_threads()
    with closing(GroupTail(backbone_settings.kafka, group)) as tail:
        polls = of_the_job(tail)
        first, second = next(polls), next(polls)
        tail.commit(first)
        assert started()
    wait_until(lambda: not started(), what="the end of the client's threads")
    assert max(len(first), len(second)) <= MOST
    with closing(GroupTail(backbone_settings.kafka, group)) as tail:
        polls, again = of_the_job(tail), []
        while len(again) < appended - len(first):
            again += next(polls)
    numbers = [record.offset for record in (*first, *again)]
    assert numbers == list(range(numbers[0], numbers[0] + appended))
    assert again[: len(second)] == second


def test_two_members_share_the_partitions_and_the_next_begins_where_they_have_left_off(
    backbone_settings, group
):
    jobs = [f"{number:08x}" for number in range(24)]
    kafka, members = backbone_settings.kafka, {}
    everything = {partition_for(f"job/{job}".encode(), kafka.partitions) for job in jobs}
    seen: dict[str, set[int]] = {"one": set(), "other": set()}
    done: dict[int, int] = {}

    def is_shared() -> bool:
        append_all(backbone_settings, [event(job, 1) for job in jobs])
        for name, tail in members.items():
            records = tail.poll(0.5, 1000)
            tail.commit(records)
            done.update({record.partition: record.offset for record in records})
            seen[name] |= {record.partition for record in records}
        if seen["one"] & seen["other"]:  # the first had all of them before the other had joined
            seen["one"], seen["other"] = set(), set()
        return all(seen.values()) and seen["one"] | seen["other"] == everything

    with closing(GroupTail(kafka, group)) as one, closing(GroupTail(kafka, group)) as other:
        members |= {"one": one, "other": other}
        wait_until(is_shared, WITHIN_S, "each partition's records for one of them")
        append_all(backbone_settings, [event(job, 2) for job in jobs])
        uncommitted = {(record.partition, record.offset) for record in one.poll(5.0, 1000)}
        assert uncommitted
    with closing(GroupTail(kafka, group)) as third:
        append_all(backbone_settings, [event(job, 3) for job in jobs])
        found: list[Record] = []
        wait_until(
            lambda: found.extend(third.poll(0.2, 1000)) or {one.partition for one in found} >= everything,
            WITHIN_S,
            "records of all partitions",
        )
    assert uncommitted <= {(record.partition, record.offset) for record in found}, "it was not committed"
    assert not [record.offset for record in found if record.offset <= done[record.partition]], "this was"


def test_nothing_is_passed_over_while_members_come_and_go_under_load(backbone_settings, group):
    kafka, seen = backbone_settings.kafka, set()

    def take_part(until: threading.Event, has_records: threading.Event) -> None:
        while not until.is_set():
            with suppress(BackboneUnreachable), closing(GroupTail(kafka, group)) as tail:
                while not until.is_set():
                    records = tail.poll(0.5, 1000)
                    # Before the commit, which may have been done when it is said to have failed.
                    seen.update((record.partition, record.offset) for record in records)
                    tail.commit(records)
                    if records:
                        has_records.set()

    def append(publisher: Publisher) -> bool:
        waiting = [publisher.append(event(f"{number:08x}", 1)) for number in range(24)]
        return all(future.result(WITHIN_S) for future in waiting)

    def appended() -> set[tuple[int, int]]:
        with closing(KafkaConsumer(**client_options(kafka))) as consumer:
            ends = consumer.end_offsets([TopicPartition(kafka.topic, n) for n in range(kafka.partitions)])
        return {(at.partition, offset) for at, end in ends.items() for offset in range(end)}

    with Publisher(backbone_settings) as publisher, ThreadPoolExecutor() as members:
        stays, goes = threading.Event(), threading.Event()
        first = members.submit(take_part, stays, threading.Event())
        try:
            for _ in range(3):
                goes.clear()
                has_records = threading.Event()
                second = members.submit(take_part, goes, has_records)
                wait_until(
                    lambda has_records=has_records: append(publisher) and has_records.is_set(),
                    WITHIN_S,
                    "records for the second member",
                )
                goes.set()
                while not second.done():
                    append(publisher)
                second.result()
                append(publisher)
            everything = appended()
            wait_until(lambda: seen >= everything, WITHIN_S, "each record at one of them")
        finally:
            stays.set()
            goes.set()
        first.result()


def test_a_member_that_was_put_out_cannot_commit_and_is_told(backbone_settings, group, appended):
    with closing(GroupTail(backbone_settings.kafka, group)) as tail:
        records = next(of_the_job(tail))
        with closing(KafkaAdminClient(**client_options(backbone_settings.kafka))) as admin:
            members = admin.describe_groups([group])[group]["members"]
            admin.remove_group_members(group, [MemberToRemove(one["member_id"]) for one in members])
        with pytest.raises(BackboneUnreachable, match=r"(?i)member|generation"):
            tail.commit(records)
    with closing(GroupTail(backbone_settings.kafka, group)) as tail:
        assert next(of_the_job(tail))[0] == records[0]


def test_where_the_groups_offset_is_gone_it_goes_on_with_the_logs_first_record(
    backbone_settings, group, appended
):
    kafka = backbone_settings.kafka
    with closing(GroupTail(kafka, group)) as tail:
        first = next(of_the_job(tail))
        tail.commit(first)
    partition, last = first[0].partition, first[-1].offset + 2
    with closing(KafkaAdminClient(**client_options(kafka))) as admin:
        admin.delete_records({TopicPartition(kafka.topic, partition): last})
    with closing(GroupTail(kafka, group)) as tail:
        assert next(of_the_job(tail))[0].offset == last


def test_a_member_that_waits_for_a_slow_one_says_so_and_gets_its_part_when_that_has_gone(
    backbone_settings, group, appended, monkeypatch
):
    monkeypatch.setattr(topic_consumer, "_JOINED_WITHIN_S", 1.0)
    slow = GroupTail(backbone_settings.kafka, group)
    first = next(of_the_job(slow))
    with closing(GroupTail(backbone_settings.kafka, group)) as waiting:
        with capture_logs() as logs:
            # The slow one is asked to let go, and does not poll.
            wait_until(lambda: waiting.poll(0.2, MOST) or logs, WITHIN_S, "that it waits")
        assert (logs[0]["event"], logs[0]["group"]) == ("group_not_joined", group)
        slow.close()
        assert next(of_the_job(waiting))[0] == first[0]


def test_a_topic_that_is_not_there_is_named(backbone_settings, group):
    nowhere = with_kafka(backbone_settings, topic="nowhere").kafka
    with (
        closing(GroupTail(nowhere, group)) as tail,
        pytest.raises(BackboneUnreachable, match="'nowhere'"),
    ):
        next(of_the_job(tail))


def test_a_kafka_that_ends_is_told_within_seconds_and_a_member_can_go(
    backbone_settings, group, appended, kafka_broker
):
    tail = GroupTail(backbone_settings.kafka, group)
    records = next(of_the_job(tail))
    with kafka_broker.away():
        began = time.monotonic()
        with pytest.raises(BackboneUnreachable):
            while time.monotonic() < began + WITHIN_S:
                tail.poll(0.2, MOST)
        with pytest.raises(BackboneUnreachable):
            tail.commit(records)
        tail.close()
        assert time.monotonic() - began < WITHIN_S


def test_a_member_can_go_while_kafka_hangs(backbone_settings, group, appended, kafka_broker):
    tail = GroupTail(backbone_settings.kafka, group)
    next(of_the_job(tail))
    with kafka_broker.standing_still():
        began = time.monotonic()
        tail.close()
        assert time.monotonic() - began < WITHIN_S / 3


def test_headers_are_read_as_the_live_view_reads_them(backbone_settings, group):
    good = event(JOB, 1)
    usual = Raw(good.key, good.value, list(good.headers()))
    bad = usual._replace(headers=[*usual.headers, (any_name(b"x\xff\xfe"), b"2")])
    many = usual._replace(headers=[*usual.headers, *((f"{n:x}", b"") for n in range(100_001))])
    append_raw(backbone_settings, [usual, bad, many])
    with closing(GroupTail(backbone_settings.kafka, group)) as tail:
        polls, found = of_the_job(tail), []
        while len(found) < 3:
            found += next(polls)
    assert [len(record.header_names) for record in found] == [7, 1, 100_008]
    assert found[1].header_names == (NOT_UTF8,)
