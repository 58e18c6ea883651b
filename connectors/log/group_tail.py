"""A member of a consumer group: the records of its partitions as they come, with its progress in Kafka."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

import structlog
from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as Partition

from connectors.log.kafka_records import message_record
from connectors.log.missing_headers import with_all_headers
from connectors.log.topic_consumer import TopicConsumer
from schemas.settings.settings import KafkaSettings
from schemas.wire.record import Record

log = structlog.stdlib.get_logger(__name__)

_JOINED_WITHIN_S: Final = 20.0
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
        self._group = group
        self._revoked = False
        # Since when nobody has said which partitions are ours; None while that is known.
        self._unassigned_since: float | None = time.monotonic()
        self._consumer = TopicConsumer(kafka, _OPTIONS | {"client.id": "trunkline-reactor", "group.id": group})
        self._consumer.client.subscribe([kafka.topic], on_assign=self._assign, on_revoke=self._revoke)

    def poll(self, timeout_s: float, most: int) -> list[Record]:
        """What has come since, at most `most`; empty when nothing came within `timeout_s` seconds.

        Raises BackboneUnreachable while Kafka is away or refuses us. Close the tail then: what the client had
        taken from Kafka by then is passed over by another poll.
        """
        self._revoked = False
        messages = self._consumer.messages(timeout_s, most)
        self._tell_unassigned()
        if self._revoked:
            self._begin_at_committed()
            return []
        found = []
        for one in messages:
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

    def _begin_at_committed(self) -> None:
        """Read again what is not committed of the partitions that are ours now.

        One poll may take partitions away, give others, and read on in those: of what it brought nobody can
        tell what was read before. Dropped, it would be passed over, for the place in the log is behind it.
        """
        client = self._consumer.client
        try:
            if ours := client.assignment():
                client.assign([Partition(one.topic, one.partition) for one in ours])
        except KafkaException as error:
            raise self._consumer.trouble(error.args[0]) from error

    def _assign(self, consumer: Any, partitions: list[Partition]) -> None:
        self._unassigned_since = None

    def _revoke(self, consumer: Any, partitions: list[Partition]) -> None:
        """The partitions are no longer ours; within `poll`, or `close`."""
        self._revoked, self._unassigned_since = True, time.monotonic()

    def _tell_unassigned(self) -> None:
        """The client says nothing while the group's coordinator is away. It goes on waiting: a slow member may
        hold up the group for minutes.
        """
        since = self._unassigned_since
        if since is not None and time.monotonic() - since > _JOINED_WITHIN_S:
            log.warning("group_not_joined", group=self._group, again_in_s=_JOINED_WITHIN_S)
            self._unassigned_since = time.monotonic()
