"""A member of a consumer group: the records of its partitions as they come, with its progress in Kafka."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as Partition

from connectors.kafka_records import message_record
from connectors.missing_headers import with_all_headers
from connectors.topic_consumer import TopicConsumer
from schemas.record import Record
from schemas.settings import KafkaSettings

_OPTIONS: Final = {
    # The smallest that a broker takes by default: how long the partitions of a killed member lie idle.
    "session.timeout.ms": 6_000,
    "heartbeat.interval.ms": 1_500,
    "auto.offset.reset": "earliest",
    # A follow-up may be a quarter of a second late; each record fetched by itself costs more than all else.
    "fetch.min.bytes": 64 * 1024,
    "fetch.wait.max.ms": 250,
    "queued.min.messages": 1000,
}


class GroupTail:
    """What the group has not done, of the partitions that are this member's. For one thread.

    A new group, or one whose offsets the log no longer has, begins with the log's first record. Raises
    BackboneUnreachable where no bootstrap server takes a connection.
    """

    def __init__(self, kafka: KafkaSettings, group: str) -> None:
        self._kafka = kafka
        self._consumer = TopicConsumer(kafka, _OPTIONS | {"client.id": "trunkline-reactor", "group.id": group})
        self._consumer.client.subscribe([kafka.topic])

    def poll(self, timeout_s: float, most: int) -> list[Record]:
        """What has come since, at most `most`; empty when nothing came within `timeout_s` seconds.

        Raises BackboneUnreachable while Kafka is away or refuses us.
        """
        found = []
        for one in self._consumer.messages(timeout_s, most):
            if one.error() is not None:
                raise self._consumer.trouble(one.error())
            found.append(message_record(one))
        return with_all_headers(self._kafka, found)

    def commit(self, records: Iterable[Record]) -> None:
        """Say in Kafka that these records, and all of their partitions before them, are done.

        Raises BackboneUnreachable, also when the group has given a partition to another member.
        """
        ends: dict[int, int] = {}
        for record in records:
            ends[record.partition] = max(record.offset + 1, ends.get(record.partition, 0))
        offsets = [Partition(self._kafka.topic, number, offset) for number, offset in ends.items()]
        if not offsets:
            return
        try:
            committed = self._consumer.client.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            raise self._consumer.trouble(error.args[0]) from error
        for one in committed:
            if one.error is not None:
                raise self._consumer.trouble(one.error)

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()
