"""Records as Kafka has them: put there past all doors, with any key, bytes and headers, and read to the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import confluent_kafka
from kafka import KafkaProducer

from schemas.keys.record_macs import SIGNED_BY_AUTHOR, mac_of
from schemas.keys.sealing import MacKey
from schemas.log_access.event_topic import topic_reader
from schemas.log_access.kafka_clients import client_options, librdkafka_options
from schemas.settings.settings import KafkaSettings, Settings
from schemas.wire.record import MAC_HEADERS, STANDARD_HEADERS, OutgoingRecord, Record, mac_input, partition_for

SILENCE_S = 30.0


class _AnyBytes(str):
    """A header's name whose bytes are what they are: no door makes such."""

    __slots__ = ("raw",)
    raw: bytes

    def encode(self, *_: Any) -> bytes:
        return self.raw


def any_name(raw: bytes) -> str:
    """A header's name made of any bytes."""
    name = _AnyBytes(raw.decode("utf-8", "replace"))
    name.raw = raw
    return name


class Raw(NamedTuple):
    """A record as it goes to Kafka."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def raw(record: OutgoingRecord) -> Raw:
    """A well-made record as it goes to Kafka."""
    return Raw(record.key, record.value, list(record.headers()))


def with_mac(record: Raw, key: MacKey) -> Raw:
    """The record with its MAC; as it is, if its author signs it or a door would not have made it so."""
    found = dict(record.headers)
    kind = found.get("ce_type") or b""
    if tuple(name for name, _ in record.headers) != STANDARD_HEADERS or kind.decode() in SIGNED_BY_AUTHOR:
        return record
    data = mac_input(record.key, found["ce_id"], found["ce_source"], kind, None, None, record.value)
    mac = (key.name.encode(), mac_of(key, data).encode())
    return record._replace(headers=[*record.headers, *zip(MAC_HEADERS[-2:], mac, strict=True)])


def read_to_end(kafka: KafkaSettings) -> Iterator[Any]:
    """Yield the records of the topic, as Kafka's client gives them, up to the end that it has now."""
    with topic_reader(kafka) as consumer:
        ends = consumer.end_offsets(sorted(consumer.assignment()))
        deadline = time.monotonic() + SILENCE_S
        while any(consumer.position(partition) < end for partition, end in ends.items()):
            assert time.monotonic() < deadline, f"nothing was read for {SILENCE_S:g} s: {ends}"
            for batch in consumer.poll(timeout_ms=200).values():
                yield from batch
                deadline = time.monotonic() + SILENCE_S


def begin_transaction(kafka: KafkaSettings) -> confluent_kafka.Producer:
    """Append a record about a job in a transaction, which the caller ends."""
    producer = confluent_kafka.Producer(
        {
            **librdkafka_options(kafka),
            "transactional.id": f"somebody-{kafka.topic}",
        }
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(kafka.topic, b"{}", b"job/0a1b2c3d", 0)
    assert producer.flush(20) == 0
    return producer


def append_raw(settings: Settings, records: Iterable[Raw]) -> list[Record]:
    """Append the records, those with a null header last; returns them as Kafka has them, by partition and
    offset.
    """
    records = list(records)
    plain = [one for one in records if all(value is not None for _, value in one.headers)]
    others = [one for one in records if any(value is None for _, value in one.headers)]
    found = [*_append_plain(settings, plain), *_append_with_nulls(settings, others)]
    return sorted(found, key=lambda record: (record.partition, record.offset))


def _append_plain(settings: Settings, records: Sequence[Raw]) -> list[Record]:
    kafka = settings.kafka
    producer = KafkaProducer(**client_options(kafka), linger_ms=1)
    try:
        sent = [
            producer.send(kafka.topic, one.value, one.key, one.headers, _partition(one, settings))
            for one in records
        ]
        told = [future.get(30) for future in sent]
    finally:
        producer.close()
    return [
        _record(one, kafka.topic, where.partition, where.offset, where.timestamp)
        for one, where in zip(records, told, strict=True)
    ]


def _append_with_nulls(settings: Settings, records: Sequence[Raw]) -> list[Record]:
    """With another producer: kafka-python's takes no null."""
    kafka = settings.kafka
    producer = confluent_kafka.Producer({**librdkafka_options(kafka)})
    told: dict[int, Any] = {}
    for number, one in enumerate(records):
        producer.produce(
            kafka.topic,
            one.value,
            one.key,
            _partition(one, settings),
            headers=one.headers,
            on_delivery=lambda error, message, number=number: told.setdefault(number, message),
        )
    assert producer.flush(30) == 0
    return [
        _record(one, kafka.topic, told[n].partition(), told[n].offset(), told[n].timestamp()[1])
        for n, one in enumerate(records)
    ]


def _record(one: Raw, topic: str, partition: int, offset: int, moment_ms: int) -> Record:
    names = tuple(str(name) for name, _ in one.headers)
    values = tuple(value for _, value in one.headers)
    return Record(topic, partition, offset, moment_ms * 1000, one.key, one.value, names, values)


def _partition(record: Raw, settings: Settings) -> int:
    return partition_for(record.key or b"", settings.kafka.partitions)
