"""Creates, configures, writes and reads the Kafka topic while the log is rebuilt from the ledger.

During the rebuild, its `message.timestamp.type` is CreateTime. So records get their former times, and every
program refuses the topic (`check_topic`) until it is complete and was compared.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple, Self

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import KafkaException, Producer
from confluent_kafka import TopicPartition as Partition
from kafka.admin import ConfigResource, ConfigResourceType, NewTopic  # type: ignore[import-untyped]

from connectors.log.kafka_libraries import message_record, producer_options, with_all_headers
from connectors.log.topic_consumer import TopicConsumer
from schemas.log_access.event_topic import (
    REACH_TIMEOUT_S,
    REBUILDING_TIMESTAMPS,
    admin_client,
    partition_count,
    reach_kafka,
    topic_config,
    topic_reader,
)
from schemas.log_access.kafka_clients import librdkafka_unreachable
from schemas.settings.settings import KafkaSettings
from schemas.wire.record import Record
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError

_TIMESTAMP_TYPE: Final = "message.timestamp.type"
_ANY_TIME: Final = str(2**63 - 1)
# Accept times of any age, and times from a clock that was ahead.
_REBUILDING: Final = {
    _TIMESTAMP_TYPE: REBUILDING_TIMESTAMPS,
    "message.timestamp.before.max.ms": _ANY_TIME,
    "message.timestamp.after.max.ms": _ANY_TIME,
}
_GONE_WITHIN_S: Final = 30.0
_APPLIED_S: Final = 1.0
_POLL_S: Final = 0.1
_SILENT_S: Final = 30.0
_POLL_RECORDS: Final = 2000
_WAITING_KBYTES: Final = 32 * 1024
_BATCH_BYTES: Final = 512 * 1024


class TopicState(NamedTuple):
    """The extent of the topic: the first offset and the end of each partition.

    `is_rebuilding`: a rebuild of the log into this topic has begun and is not complete.
    """

    begins: dict[int, int]
    ends: dict[int, int]
    is_rebuilding: bool


def topic_state(kafka: KafkaSettings) -> TopicState | None:
    """Return the first offset and the end of each partition of the topic, or None if there is no topic.

    Raises:
        BackboneUnreachable: Kafka does not answer.
        Refused: The topic has fewer partitions than the settings say.
    """
    with admin_client(kafka) as admin:
        count = partition_count(admin, kafka.topic)
        if count is None:
            return None
        if count < kafka.partitions:
            raise Refused(
                f"topic {kafka.topic!r} has {count} partitions, kafka.partitions is {kafka.partitions}. "
                "Nothing was changed"
            )
        stamped = _timestamp_type(admin, kafka.topic)
    with topic_reader(kafka) as consumer:
        assigned = sorted(consumer.assignment())
        begins, ends = consumer.beginning_offsets(assigned), consumer.end_offsets(assigned)
    return TopicState(
        {where.partition: offset for where, offset in begins.items()},
        {where.partition: offset for where, offset in ends.items()},
        stamped == REBUILDING_TIMESTAMPS,
    )


def make_topic(kafka: KafkaSettings) -> None:
    """Create the empty topic for a rebuild of the log, and wait until Kafka has it. It must not exist.

    The topic stores the time that a producer gives to a record (`message.timestamp.type` CreateTime). As long
    as it has this setting, every other program of Trunkline refuses it. `end_rebuilding` changes the setting.

    Raises:
        BackboneUnreachable: Kafka does not answer.
    """
    config = topic_config(kafka) | _REBUILDING
    topic = NewTopic(kafka.topic, kafka.partitions, kafka.replication_factor, topic_configs=config)
    with admin_client(kafka) as admin:
        admin.create_topics([topic])
        admin.wait_for_topics([kafka.topic], timeout_ms=int(REACH_TIMEOUT_S * 1000))


def delete_topic(kafka: KafkaSettings) -> None:
    """Delete the topic, and wait until Kafka has deleted it.

    Raises:
        BackboneUnreachable: Kafka does not answer, or has not deleted the topic within 30 s.
    """
    deadline = time.monotonic() + _GONE_WITHIN_S
    with admin_client(kafka) as admin:
        admin.delete_topics([kafka.topic])
        while partition_count(admin, kafka.topic) is not None:
            if time.monotonic() > deadline:
                raise BackboneUnreachable(
                    f"Kafka has not deleted topic {kafka.topic!r} within {_GONE_WITHIN_S:g} s; run this again"
                )
            time.sleep(_POLL_S)


def begin_rebuilding(kafka: KafkaSettings) -> None:
    """Prepare the existing topic for a rebuild of the log, and wait until Kafka has applied the change.

    The topic then stores the time that a producer gives to a record (`message.timestamp.type` CreateTime). As
    long as it has this setting, every other program of Trunkline refuses it. `end_rebuilding` changes it back.

    Raises:
        BackboneUnreachable: Kafka does not answer, or does not apply the change within 10 s.
    """
    _alter(kafka, _REBUILDING)
    # A broker reports the new configuration a moment before it applies it. A record that is stamped in between
    # would keep the wrong time.
    time.sleep(_APPLIED_S)


def end_rebuilding(kafka: KafkaSettings) -> None:
    """Let Kafka set the time of each record in the topic again, after the log is rebuilt.

    The call waits until Kafka has applied the change. From then on, all programs accept the topic.

    Raises:
        BackboneUnreachable: Kafka does not answer, or does not apply the change within 10 s.
    """
    wanted = topic_config(kafka)
    _alter(kafka, {name: wanted.get(name) for name in _REBUILDING})


def _alter(kafka: KafkaSettings, configs: dict[str, Any]) -> None:
    changes = {name: ("DELETE", None) if value is None else ("SET", value) for name, value in configs.items()}
    deadline = time.monotonic() + REACH_TIMEOUT_S
    with admin_client(kafka) as admin:
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, kafka.topic, changes)])
        while _timestamp_type(admin, kafka.topic) != configs[_TIMESTAMP_TYPE]:
            if time.monotonic() > deadline:
                raise BackboneUnreachable(f"Kafka does not apply {_TIMESTAMP_TYPE} to topic {kafka.topic!r}")
            time.sleep(_POLL_S)


def _timestamp_type(admin: Any, topic: str) -> str:
    resource = ConfigResource(ConfigResourceType.TOPIC, topic)
    stored = admin.describe_configs([resource], config_filter="all")["topic"][topic]
    return str(stored[_TIMESTAMP_TYPE]["value"])


class TopicWriter:
    """A producer that appends records at their former offsets. A context manager, for one thread.

    Raises:
        BackboneUnreachable: No broker accepts a connection.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        reach_kafka(kafka)
        self._kafka = kafka
        self._wrong: TrunklineError | None = None
        self._answered_at = 0.0
        options = producer_options(kafka, linger_ms=20) | {
            "client.id": "trunkline-log-rebuild",
            "batch.size": min(_BATCH_BYTES, kafka.record_limit_bytes // 2),
            "queue.buffering.max.kbytes": _WAITING_KBYTES,
            # Records of other clients may be as long as the topic allows.
            "message.max.bytes": kafka.record_limit_bytes,
        }
        self._producer: Any = Producer(options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._producer.purge()
        self._producer.close()

    def append(self, records: Sequence[Record]) -> None:
        """Append records of one partition in order, and wait until Kafka has acknowledged all of them.

        The offsets in `records` must begin at the partition's end and have no gaps.

        Raises:
            BackboneUnreachable: Kafka is unreachable, refused a record, or acknowledged none for
                `kafka.delivery_timeout_s`.
            Refused: A record got another offset than its own, because another program has written to the topic.
        """
        expected = iter([record.offset for record in records])
        self._answered_at = time.monotonic()

        def answered(error: Any, message: Any) -> None:
            wanted = next(expected)
            self._answered_at = time.monotonic()
            if self._wrong is not None:
                return
            if error is not None:
                where = f", offset {wanted} of partition {message.partition()}"
                self._wrong = librdkafka_unreachable(self._kafka, error, where)
            elif message.offset() != wanted:
                self._wrong = Refused(
                    f"the record for offset {wanted} of partition {message.partition()} got offset "
                    f"{message.offset()}: another program has written to topic {self._kafka.topic!r} "
                    "meanwhile. Stop it, delete the topic (kafka-topics --delete), then run this again"
                )

        for record in records:
            self._produce(record, answered)
        while len(self._producer) and self._wrong is None:
            self._wait()
        if self._wrong is not None:
            raise self._wrong

    def _produce(self, record: Record, answered: Any) -> None:
        headers = list(zip(record.header_names, record.header_values, strict=True))
        while self._wrong is None:
            try:
                self._producer.produce(
                    record.topic,
                    key=record.key,
                    value=record.value,
                    headers=headers,
                    partition=record.partition,
                    timestamp=record.logged_at_us // 1000,
                    on_delivery=answered,
                )
            except BufferError:
                self._wait()
            except KafkaException as error:
                where = f", offset {record.offset} of partition {record.partition}"
                raise librdkafka_unreachable(self._kafka, error.args[0], where) from error
            else:
                self._producer.poll(0)
                return

    def _wait(self) -> None:
        self._producer.poll(_POLL_S)
        limit_s = self._kafka.delivery_timeout_s
        if time.monotonic() - self._answered_at > limit_s:
            raise BackboneUnreachable(
                f"Kafka at {self._kafka.bootstrap_servers} did not acknowledge a record within {limit_s:g} s; "
                "run this again: it goes on where it stopped"
            )


def records(kafka: KafkaSettings, partition: int, first: int, end: int) -> Generator[Record, None, None]:
    """Yield the records of one partition from offset `first` to before `end`, read from Kafka.

    Offsets without a record are skipped. Close the generator after use (`contextlib.closing`), because it has a
    connection to Kafka.

    Raises:
        BackboneUnreachable: Kafka is unreachable, or no record arrives for 30 s.
    """
    options = {
        "client.id": "trunkline-log-rebuild",
        "group.id": "trunkline-log-rebuild",  # required by the client, which joins no group
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "queued.min.messages": 10 * _POLL_RECORDS,
        "fetch.wait.max.ms": 20,
    }
    consumer = TopicConsumer(kafka, options)
    try:
        consumer.client.assign([Partition(kafka.topic, partition, first)])
        position, deadline = first, time.monotonic() + _SILENT_S
        while position < end:
            found = []
            for message in consumer.messages(_POLL_S, _POLL_RECORDS):
                error = message.error()
                if error is None:
                    found.append(message_record(message))
                    position = message.offset() + 1
                elif error.code() == ClientError._PARTITION_EOF:
                    # Offsets without a record, such as the end of a transaction, count as read.
                    position = max(position, message.offset())
                else:
                    raise consumer.trouble(error)
            if found:
                deadline = time.monotonic() + _SILENT_S
                yield from (record for record in with_all_headers(kafka, found) if record.offset < end)
            elif time.monotonic() > deadline:
                raise BackboneUnreachable(
                    f"Kafka at {kafka.bootstrap_servers} hands out no records of {kafka.topic!r}"
                )
    finally:
        consumer.close()
