"""A member of a consumer group: yields the records of its partitions and commits its progress to Kafka."""

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
    # The smallest value that a broker accepts by default. The partitions of a killed member are idle so long.
    "session.timeout.ms": 6_000,
    "heartbeat.interval.ms": 1_500,
    "auto.offset.reset": "earliest",
    # A derived record may be a quarter of a second late. To fetch each record by itself costs more than all
    # else.
    "fetch.min.bytes": 64 * 1024,
    "fetch.wait.max.ms": 250,
    "queued.min.messages": 1000,
}


class GroupTail:
    """The uncommitted records of the partitions that Kafka has assigned to this member. For one thread.

    A new group, or one whose offsets the log no longer has, begins with the log's first record.

    Raises:
        BackboneUnreachable: No bootstrap server accepts a connection.
    """

    def __init__(self, kafka: KafkaSettings, group: str) -> None:
        self._kafka = kafka
        self._group = group
        self._revoked = False
        # Since when this member waits for its partitions; None while they are assigned.
        self._unassigned_since: float | None = time.monotonic()
        self._consumer = TopicConsumer(kafka, _OPTIONS | {"client.id": "trunkline-reactor", "group.id": group})
        self._consumer.client.subscribe([kafka.topic], on_assign=self._assign, on_revoke=self._revoke)

    def poll(self, timeout_s: float, most: int) -> list[Record]:
        """Return at most `most` new records; none if none arrives within `timeout_s` seconds.

        Raises:
            BackboneUnreachable: Kafka is unreachable or refuses us. Close the tail then: another poll would
                skip the records that the client had already fetched.
        """
        self._revoked = False
        messages = self._consumer.messages(timeout_s, most)
        self._log_unassigned()
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
        """Commit these records, and all records before them in their partitions, as done.

        Raises:
            BackboneUnreachable: Kafka is unreachable, or has assigned a partition to another member.
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
        """Seek back to the committed offsets of the assigned partitions.

        One poll may revoke partitions, assign others and read them. It is unknown which of its records were
        read before. To drop them without seeking would skip them, because the client's position is behind them.
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
        """Note that the partitions were revoked; called within `poll` or `close`."""
        self._revoked, self._unassigned_since = True, time.monotonic()

    def _log_unassigned(self) -> None:
        """Log now and then that no partition is assigned; the client does not report a missing coordinator.

        The member goes on waiting: a slow member may hold up the group for minutes.
        """
        since = self._unassigned_since
        if since is not None and time.monotonic() - since > _JOINED_WITHIN_S:
            log.warning("group_not_joined", group=self._group, again_in_s=_JOINED_WITHIN_S)
            self._unassigned_since = time.monotonic()
