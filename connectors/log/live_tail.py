"""The tail of the topic for the live view: a Kafka consumer without a group, from given offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import TopicPartition as Partition

from connectors.log.kafka_records import message_record
from connectors.log.missing_headers import with_all_headers
from connectors.log.topic_consumer import TopicConsumer
from schemas.errors import TrunklineError
from schemas.settings.settings import KafkaSettings
from schemas.wire.record import Record

# Few enough that the first record of a full poll does not wait long for its verdict.
POLL_RECORDS: Final = 500
_OPTIONS: Final = {
    "client.id": "trunkline-live-view",
    # The client requires a name, but joins no group: it assigns its partitions itself, commits no offset, and
    # needs no permission for the group.
    "group.id": "trunkline-live-view",
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 500,
    # The client fetches ahead while fewer records than this wait in it.
    "queued.min.messages": 20 * POLL_RECORDS,
}


class OffsetsGoneError(TrunklineError):
    """The log does not have an offset from which the tail has to read."""


class LogTail:
    """A reader of all partitions from `offsets` on; from 0 in a partition that is not named.

    A context manager, for one thread.

    Attributes:
        reached: The offset after the last one that was read, by partition. Offsets without a record, such as
            the end of a transaction, count as read.

    Raises:
        BackboneUnreachable: No bootstrap server accepts a connection.
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

    def __exit__(self, *error: object) -> None:
        self._consumer.close()

    def poll(self, timeout_s: float) -> list[Record]:
        """Return at most POLL_RECORDS new records; none if none arrives within `timeout_s` seconds.

        Raises:
            OffsetsGoneError: The log does not have the offset to read from.
            BackboneUnreachable: Kafka is unreachable or refuses us.
        """
        found = []
        for one in self._consumer.messages(timeout_s, POLL_RECORDS):
            if one.error() is not None:
                self._handle_error(one)
                continue
            found.append(message_record(one))
            self.reached[one.partition()] = one.offset() + 1
        return with_all_headers(self._kafka, found)

    def ends(self) -> dict[int, int]:
        """Return the end of each partition as of Kafka's last answer; partitions without one are absent."""
        client = self._consumer.client
        known = {one.partition: client.get_watermark_offsets(one, cached=True) for one in self._where}
        return {number: found[1] for number, found in known.items() if found is not None and found[1] >= 0}

    def _handle_error(self, message: Any) -> None:
        error = message.error()
        if error.code() == ClientError._PARTITION_EOF:
            self.reached[message.partition()] = message.offset()
            return
        if error.code() == ClientError.GROUP_AUTHORIZATION_FAILED:
            return  # the client looks for a coordinator of the group, and needs none
        if error.code() in (ClientError._AUTO_OFFSET_RESET, ClientError.OFFSET_OUT_OF_RANGE):
            raise OffsetsGoneError(error.str())
        raise self._consumer.trouble(error)
