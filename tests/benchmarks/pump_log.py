"""The log under `bench pump`: which answers are in it, its records per message, and the control.

The control is a bare producer and consumer of confluent-kafka on a topic of its own, at the same broker. It
appends the same records per message, of the same sizes. As many chains as there are senders run at once. Each
appends one record after the other of its message, and awaits each of them: it goes on when the consumer has the
record.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition
from kafka.admin import NewTopic  # type: ignore[import-untyped]

from connectors.log.kafka_libraries import client_options, producer_options
from schemas.log_access.event_topic import admin_client
from schemas.settings.settings import KafkaSettings

# As the gateway's publisher has it.
LINGER_MS = 2
_STEP_S = 0.05
_BATCH = 500
_NUMBER_BYTES = 8


class RecordShare(NamedTuple):
    """One type of record: how many there are for each message, and the median size of a value in bytes."""

    type: str
    per_message: float
    size: int


@contextmanager
def _consumer(kafka: KafkaSettings, topic: str) -> Iterator[Any]:
    """A consumer of all of a topic's partitions, from their beginnings, outside any group."""
    options = {**client_options(kafka), "group.id": "bench", "enable.auto.commit": False}
    consumer = Consumer({**options, "fetch.wait.max.ms": 500, "fetch.queue.backoff.ms": 10})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(kafka.partitions)])
    try:
        yield consumer
    finally:
        consumer.close()


class Answers:
    """The answers in the log: the messages posted to mailboxes whose stream begins with `prefix`.

    A context manager. A message that was posted twice counts once.
    """

    def __init__(self, kafka: KafkaSettings, prefix: str) -> None:
        self._kafka = kafka
        self._prefix = prefix.encode()
        self._found: set[bytes] = set()
        self._open = _consumer(kafka, kafka.topic)

    def __enter__(self) -> Answers:
        self._consumer = self._open.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def wait(self, count: int, within_s: float) -> None:
        """Wait until so many answers are in the log. Raises RuntimeError if they are not there in time."""
        deadline = time.monotonic() + within_s
        while len(self._found) < count:
            for one in self._consumer.consume(_BATCH, _STEP_S):
                if one.error() is None and one.key().startswith(self._prefix):
                    self._found.add(dict(one.headers())["ce_id"])
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(self._found)} of {count} answers were there in time")


def record_shares(kafka: KafkaSettings, messages: int) -> list[RecordShare]:
    """Return the records in the log that messages have, by type: those of mailboxes and threads."""
    sizes: dict[str, list[int]] = defaultdict(list)
    with _consumer(kafka, kafka.topic) as consumer:
        ends = {
            number: consumer.get_watermark_offsets(TopicPartition(kafka.topic, number))[1]
            for number in range(kafka.partitions)
        }
        left = sum(ends.values())
        while left > 0:
            for one in consumer.consume(_BATCH, _STEP_S):
                if one.error() is None:
                    left -= 1
                    if one.key().startswith((b"mailbox/", b"thread/")):
                        sizes[dict(one.headers())["ce_type"].decode()].append(len(one.value()))
    found = [
        RecordShare(name, len(all_) / messages, int(statistics.median(all_))) for name, all_ in sizes.items()
    ]
    return sorted((share for share in found if share.per_message > 0.001), key=lambda share: -share.per_message)


def make_topic(kafka: KafkaSettings, topic: str) -> None:
    """Make a topic with as many partitions as the log."""
    with admin_client(kafka) as admin:
        admin.create_topics([NewTopic(topic, kafka.partitions, 1)])


def control_per_s(kafka: KafkaSettings, shares: Sequence[RecordShare], chains: int, count: int) -> float:
    """Return how many messages a second the control handles, when it appends `shares` for each of `count`."""
    topic = f"control.{uuid.uuid4().hex[:8]}"
    make_topic(kafka, topic)
    producer = Producer(producer_options(kafka, linger_ms=LINGER_MS))
    waiting: dict[bytes, int] = {}
    chain_records: dict[int, list[int]] = {}
    owed: Counter[str] = Counter()
    numbers = iter(range(10**9))
    begun, ended = 0, 0

    def append(chain: int) -> None:
        """Append the next record of a chain's message; begin the next message after its last record."""
        nonlocal begun, ended
        if not chain_records[chain]:
            ended += 1
            if begun == count:
                return
            begun += 1
            chain_records[chain] = sizes_of_next(shares, owed)
        size, number = chain_records[chain].pop(0), next(numbers)
        name = number.to_bytes(_NUMBER_BYTES, "big")
        waiting[name] = chain
        producer.produce(topic, name + bytes(size - _NUMBER_BYTES), partition=number % kafka.partitions)

    with _consumer(kafka, topic) as consumer:
        consumer.consume(1, 1.0)  # its first fetch
        started = time.monotonic()
        for chain in range(chains):
            begun += 1
            chain_records[chain] = sizes_of_next(shares, owed)
            append(chain)
        while ended < count and time.monotonic() - started < 300:
            producer.poll(0)
            first = consumer.poll(_STEP_S)
            for one in [] if first is None else [first, *consumer.consume(_BATCH, 0)]:
                if one.error() is None:
                    append(waiting.pop(one.value()[:_NUMBER_BYTES]))
        took_s = time.monotonic() - started
    producer.flush(10)
    if ended < count:
        raise RuntimeError(f"the control handled {ended} of {count} messages")
    return count / took_s


def sizes_of_next(shares: Sequence[RecordShare], owed: Counter[str]) -> list[int]:
    """Return the sizes of the records of the next message. A type with a fraction has a record now and then."""
    found = []
    for share in shares:
        owed[share.type] += share.per_message  # type: ignore[assignment]  # a fraction
        whole = int(owed[share.type] + 1e-9)
        owed[share.type] -= whole
        found += [max(share.size, _NUMBER_BYTES)] * whole
    return found or [max(shares[0].size, _NUMBER_BYTES)]


def total_per_message(shares: Sequence[RecordShare]) -> dict[str, Any]:
    """Return the figures `records_per_message` and `records` of the report."""
    by_type: Mapping[str, float] = {share.type: round(share.per_message, 3) for share in shares}
    return {"records_per_message": round(sum(by_type.values()), 2), "records": by_type}
