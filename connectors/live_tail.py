"""Reads the one topic's tail for the live view: a Kafka consumer without a group, from given offsets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import Consumer
from confluent_kafka import KafkaError as ClientError
from confluent_kafka import TopicPartition as Partition
from kafka import KafkaConsumer, TopicPartition  # type: ignore[import-untyped]
from kafka.errors import KafkaError  # type: ignore[import-untyped]

from connectors.kafka_records import message_record, to_record
from connectors.kafka_repairs import repair_kafka_client
from schemas.errors import BackboneUnreachable, TrunklineError
from schemas.event_topic import REACH_TIMEOUT_S, reach_kafka
from schemas.kafka_clients import (
    SILENT,
    client_security,
    librdkafka_security,
    librdkafka_unreachable,
    unreachable,
)
from schemas.record import Record
from schemas.settings import KafkaSettings

# Few enough that the first of a full poll does not wait long for its verdict.
POLL_RECORDS: Final = 500
_REQUEST_TIMEOUT_MS: Final = 10_000
# Of all other troubles the client takes care by itself.
_AWAY: Final = (
    ClientError._ALL_BROKERS_DOWN,
    ClientError._AUTHENTICATION,
    ClientError.TOPIC_AUTHORIZATION_FAILED,
    ClientError.UNKNOWN_TOPIC_OR_PART,
)


def consumer_options(kafka: KafkaSettings) -> dict[str, Any]:
    """What the consumers of live view and reactor have in common."""
    repair_kafka_client()
    return {
        "bootstrap_servers": kafka.bootstrap_servers,
        **client_security(kafka),
        "enable_auto_commit": False,
        "bootstrap_timeout_ms": int(REACH_TIMEOUT_S * 1000),
        "request_timeout_ms": _REQUEST_TIMEOUT_MS,
        "reconnect_backoff_max_ms": 1000,
        "fetch_min_bytes": 1,
        "fetch_max_wait_ms": 500,
        "max_partition_fetch_bytes": max(1024 * 1024, kafka.record_limit_bytes),
        "max_poll_records": POLL_RECORDS,
        # kafka-python's CRC is Python, 60 ns a byte; the log's bytes are checked by Spark, too.
        "check_crcs": False,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
    }


class OffsetsGoneError(TrunklineError):
    """The log does not have an offset from which it is to be read."""


class LogTail:
    """Every partition's records from `offsets` on (a partition that is absent: from 0), as they come.

    A client of librdkafka, which fetches outside the interpreter (decision 0023). A context manager, for one
    thread. Raises BackboneUnreachable where no bootstrap server takes a connection.

    `reached`: by partition, the offset up to which (exclusive) all has been given; what is no record, as the
    end of a transaction, counts, too.
    """

    def __init__(self, kafka: KafkaSettings, offsets: Mapping[int, int]) -> None:
        reach_kafka(kafka)
        self._kafka = kafka
        self._away: ClientError | None = None
        self.reached: dict[int, int] = {}
        self._where = [
            Partition(kafka.topic, number, offsets.get(number, 0)) for number in range(kafka.partitions)
        ]
        self._consumer: Any = Consumer(_tail_options(kafka) | {"error_cb": self._hear})
        self._consumer.assign(self._where)

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
        first = self._consumer.poll(timeout_s)
        if self._away is not None:
            raise librdkafka_unreachable(self._kafka, self._away, "")
        if first is None:
            return []
        found = []
        for one in (first, *self._consumer.consume(POLL_RECORDS - 1, 0)):
            if one.error() is not None:
                self._look_at(one)
                continue
            found.append(message_record(one))
            self.reached[one.partition()] = one.offset() + 1
        return self._with_all_headers(found)

    def ends(self) -> dict[int, int]:
        """By partition, where the log ends as Kafka last said; a partition of which it has not is absent."""
        known = {one.partition: self._consumer.get_watermark_offsets(one, cached=True) for one in self._where}
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
        raise librdkafka_unreachable(self._kafka, error, f", topic {self._kafka.topic!r}")

    def _with_all_headers(self, found: list[Record]) -> list[Record]:
        """Where librdkafka has no headers there may be some: more than 100,000, or of a form that Java reads. A
        record of ours has some, so the slower client can be asked what there is.
        """
        bare = [record for record in found if not record.header_names]
        for partition in {record.partition for record in bare}:
            offsets = [record.offset for record in bare if record.partition == partition]
            read = records_between(self._kafka, partition, offsets[0], offsets[-1])
            found = [
                read.get(one.offset, one) if one.partition == partition and not one.header_names else one
                for one in found
            ]
        return found

    def _hear(self, error: ClientError) -> None:
        """The client tells of a trouble, within `poll`. That all are away is said last, and says least."""
        if self._away is None and (error.fatal() or error.code() in _AWAY):
            self._away = error


def _tail_options(kafka: KafkaSettings) -> dict[str, Any]:
    """What the tail's client is told (librdkafka's CONFIGURATION.md has the names)."""
    return {
        "bootstrap.servers": kafka.bootstrap_servers,
        **librdkafka_security(kafka),
        "client.id": "trunkline-live-view",
        # It wants a name, and joins no group: the partitions are assigned, no offset is kept in Kafka, and it
        # need not be allowed to.
        "group.id": "trunkline-live-view",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        # As Spark reads: what one of them sees, the other must.
        "isolation.level": "read_uncommitted",
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 500,
        "fetch.message.max.bytes": max(1024 * 1024, kafka.record_limit_bytes),
        # What waits for us in the client; below it, the next is fetched at once.
        "queued.min.messages": 20 * POLL_RECORDS,
        "queued.max.messages.kbytes": max(16 * 1024, 4 * kafka.record_limit_bytes // 1024),
        "fetch.queue.backoff.ms": 10,
        "socket.timeout.ms": _REQUEST_TIMEOUT_MS,
        "reconnect.backoff.max.ms": 1000,
        # How long a topic may be unknown before that is said.
        "topic.metadata.propagation.max.ms": 2000,
        "allow.auto.create.topics": False,
        "enable.metrics.push": False,
        # What it has to say comes to `error_cb`; else it would write to stderr.
        "logger": SILENT,
    }


def records_between(kafka: KafkaSettings, partition: int, first: int, last: int) -> dict[int, Record]:
    """By offset, the records of a partition from `first` to `last`, read by kafka-python. Raises
    BackboneUnreachable, also when they do not come within REACH_TIMEOUT_S.
    """
    where = TopicPartition(kafka.topic, partition)
    found: dict[int, Record] = {}
    deadline = time.monotonic() + REACH_TIMEOUT_S
    reach_kafka(kafka)
    try:
        consumer = KafkaConsumer(
            client_id="trunkline-live-view", group_id=None, auto_offset_reset="none", **consumer_options(kafka)
        )
        try:
            consumer.assign([where])
            consumer.seek(where, first)
            while consumer.position(where) <= last:
                if time.monotonic() > deadline:
                    raise BackboneUnreachable(
                        f"offsets {first} to {last} of partition {partition} did not come"
                    )
                for batch in consumer.poll(timeout_ms=200).values():
                    found |= {one.offset: to_record(one) for one in batch}
        finally:
            consumer.close(autocommit=False)
    except KafkaError as error:
        raise unreachable(kafka, error) from error
    return found
