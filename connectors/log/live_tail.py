"""Reads the one topic's tail for the live view: a Kafka consumer without a group, from given offsets."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import TopicPartition as Partition

from connectors.log.kafka_records import message_record
from connectors.log.missing_headers import with_all_headers
from connectors.log.topic_consumer import TopicConsumer
from schemas.errors import TrunklineError
from schemas.settings.settings import KafkaSettings
from schemas.wire.record import Record

# Few enough that the first of a full poll does not wait long for its verdict.
POLL_RECORDS: Final = 500
_OPTIONS: Final = {
    "client.id": "trunkline-live-view",
    # It wants a name, and joins no group: the partitions are assigned, no offset is kept in Kafka, and it need
    # not be allowed to.
    "group.id": "trunkline-live-view",
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 500,
    # What waits for us in the client; below it, the next is fetched at once.
    "queued.min.messages": 20 * POLL_RECORDS,
}


class OffsetsGoneError(TrunklineError):
    """The log does not have an offset from which it is to be read."""


class LogTail:
    """Every partition's records from `offsets` on (a partition that is absent: from 0), as they come.

    A context manager, for one thread. Raises BackboneUnreachable where no bootstrap server takes a connection.

    `reached`: by partition, the offset up to which (exclusive) all has been given; what is no record, as the
    end of a transaction, counts, too.
    """

    def __init__(self, kafka: KafkaSettings, offsets: Mapping[int, int]) -> None:
        self._kafka = kafka
        self.reached: dict[int, int] = {}
        self._where = [
            Partition(kafka.topic, number, offsets.get(number, 0)) for number in range(kafka.partitions)
        ]
        self._consumer = TopicConsumer(kafka, _OPTIONS)
        self._consumer.client.assign(self._where)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.close()

    def poll(self, timeout_s: float) -> list[Record]:
        """What has come since, at most POLL_RECORDS; empty when nothing came within `timeout_s` seconds.

        Raises OffsetsGoneError, and BackboneUnreachable while Kafka is away or refuses us.
        """
        found = []
        for one in self._consumer.messages(timeout_s, POLL_RECORDS):
            if one.error() is not None:
                self._look_at(one)
                continue
            found.append(message_record(one))
            self.reached[one.partition()] = one.offset() + 1
        return with_all_headers(self._kafka, found)

    def ends(self) -> dict[int, int]:
        """By partition, where the log ends as Kafka last said; a partition of which it has not is absent."""
        client = self._consumer.client
        known = {one.partition: client.get_watermark_offsets(one, cached=True) for one in self._where}
        return {number: found[1] for number, found in known.items() if found is not None and found[1] >= 0}

    def _look_at(self, message: Any) -> None:
        error = message.error()
        if error.code() == ClientError._PARTITION_EOF:
            self.reached[message.partition()] = message.offset()
            return
        if error.code() == ClientError.GROUP_AUTHORIZATION_FAILED:
            return  # it looks for its group's coordinator, and needs none
        if error.code() in (ClientError._AUTO_OFFSET_RESET, ClientError.OFFSET_OUT_OF_RANGE):
            raise OffsetsGoneError(error.str())
        raise self._consumer.trouble(error)
