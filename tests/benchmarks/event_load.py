"""The load of the benchmarks: signed events of many jobs, as a door would put them into Kafka."""

from __future__ import annotations

import random
from collections.abc import Iterator

from confluent_kafka import Producer

from schemas.keys.record_macs import GATEWAY, load_mac_key, mac_headers
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.log_access.kafka_clients import librdkafka_options
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_EVENT, JobRegistration
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.job_event import COMPLETED, PROGRESS, STARTED
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical

EVENTS_PER_JOB = 12
CONCURRENT_JOBS = 500


def registrations(jobs: int, keyring: Keyring, first: int = 0) -> Iterator[OutgoingRecord]:
    """The records that register the jobs numbered from `first`."""
    for number in range(first, first + jobs):
        yield JobRegistration(
            sealed_secret=keyring.seal(f"secret-{number}".encode(), job_secret_purpose(f"{number:08x}")),
            job_id=f"{number:08x}",
            description="read, think, answer",
        ).record(door="cli", principal="operator")


def event(
    number: int, seq: int, kind: str, *, forged: bool = False, per_job: int = EVENTS_PER_JOB
) -> OutgoingRecord:
    """One signed event of job `number`, about 330 bytes. `per_job`: how many the job has."""
    job_id = f"{number:08x}"
    body = {
        "schema_version": 1,
        "seq": seq,
        "job_id": job_id,
        "event": kind,
        "timestamp": f"2026-11-21T10:{seq % 60:02d}:00.123Z",
        "detail": f"step {seq} of {per_job} done, reading the index",
        "data": {"step": seq, "note": "all is well so far", "model": "small"},
    }
    value = canonical(sign_event(body, f"secret-{number}{'x' if forged else ''}"))
    topic = f"python/mqtt/jobs/{job_id}/events".encode()
    return OutgoingRecord(f"job/{job_id}", content_id(topic, value), "mqtt", "unverified", JOB_EVENT, value)


def events(
    count: int, seed: int = 1, first: int = 0, per_job: int = EVENTS_PER_JOB
) -> Iterator[OutgoingRecord]:
    """`count` events: 500 jobs at a time, each with 12 events; 5% duplicates, 1% forged, 1% out of order.

    `per_job`: another number of events for each job. If they are many, half of the jobs run at a time, so that
    the other half comes to its end.
    """
    draw = random.Random(seed)
    at_once = concurrent_jobs(count, per_job)
    running: list[tuple[int, list[int]]] = []
    following = first
    sent = 0
    while sent < count:
        while len(running) < at_once:
            order = list(range(1, per_job + 1))
            for _ in range(per_job // EVENTS_PER_JOB):
                if draw.random() < 0.12:
                    at = draw.randrange(1, per_job - 2)
                    order[at], order[at + 1] = order[at + 1], order[at]
            running.append((following, order))
            following += 1
        at = draw.randrange(len(running))
        number, order = running[at]
        seq = order.pop(0)
        kind = STARTED if seq == 1 else COMPLETED if seq == per_job else PROGRESS
        record = event(number, seq, kind, forged=draw.random() < 0.01, per_job=per_job)
        for _ in range(2 if draw.random() < 0.05 else 1):
            yield record
            sent += 1
        if not order:
            running[at] = running[-1]
            running.pop()


def concurrent_jobs(count: int, per_job: int) -> int:
    """How many jobs of `events` run at a time."""
    if per_job == EVENTS_PER_JOB:
        return CONCURRENT_JOBS
    return max(1, min(CONCURRENT_JOBS, count // per_job // 2))


def jobs_for(count: int, per_job: int = EVENTS_PER_JOB) -> int:
    """How many jobs `events(count)` needs at most."""
    return count // per_job + concurrent_jobs(count, per_job) + 1


class TopicWriter:
    """Appends records to a topic, partitioned and with MACs as ours."""

    def __init__(self, settings: Settings, linger_ms: int = 50) -> None:
        kafka = settings.kafka
        self._topic = kafka.topic
        self._mac_key = load_mac_key(settings, GATEWAY)
        self._producer = Producer(
            {
                **librdkafka_options(kafka),
                "linger.ms": linger_ms,
                "partitioner": "murmur2",
                "enable.idempotence": True,
                "queue.buffering.max.messages": 200_000,
            }
        )

    def append(self, record: OutgoingRecord) -> None:
        """Hand one record over; waits while the buffer is full."""
        headers: list[tuple[str, str | bytes | None]] = [
            *record.headers(mac=mac_headers(record, self._mac_key))
        ]
        while True:
            try:
                self._producer.produce(self._topic, record.value, record.key, headers=headers)
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def flush(self) -> None:
        """Wait until Kafka has all. Raises RuntimeError after 60 s."""
        if self._producer.flush(60):
            raise RuntimeError("Kafka did not take all records in 60 s")


def fill(settings: Settings, records: Iterator[OutgoingRecord]) -> int:
    """Append all records; returns how many."""
    writer = TopicWriter(settings)
    count = 0
    for record in records:
        writer.append(record)
        count += 1
    writer.flush()
    return count
