"""The topic of the log: the partition of a stream, and the check of the topic before every program's start.

The partition of a stream depends on the partition count, so the count and the epoch are stored in the log's
first record. Every program calls `check_topic` before it starts, and refuses to run on a mismatch.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any, Final

import orjson
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition  # type: ignore[import-untyped]
from kafka.admin import ConfigResource, ConfigResourceType  # type: ignore[import-untyped]
from kafka.errors import KafkaError, UnknownTopicOrPartitionError  # type: ignore[import-untyped]

from schemas.log_access.kafka_clients import (
    RIGHTS_PAGE,
    bootstrap_addresses,
    client_options,
    kafka_context,
    tls_trouble,
    unreachable,
)
from schemas.settings.settings import KafkaSettings, Settings
from schemas.streams.control.control_fold import CONTROL_TOPOLOGY, TOPOLOGY_STREAM
from schemas.tables.ledger import LEDGER
from schemas.wire.record import partition_for
from trunkline_agent.errors import BackboneUnreachable, TrunklineError

REACH_TIMEOUT_S: Final = 10.0
REBUILDING_TIMESTAMPS: Final = "CreateTime"
"""The topic's message.timestamp.type while the log is rebuilt from the ledger."""
_GROWING: Final = "neither can change in a topic: to grow, raise kafka.epoch and choose a new kafka.topic"


class TopicMismatchError(TrunklineError):
    """The topic in Kafka and the settings differ. The message gives both values and says what to do."""


class TopicMissingError(TrunklineError):
    """The topic does not exist, or its first record is missing."""


class LogLostError(TopicMissingError):
    """The topic does not exist, but the ledger has records of it: Kafka's data was lost."""


class LogUnfinishedError(TopicMismatchError):
    """The topic is being rebuilt from the ledger and is not complete yet."""


def reach_kafka(kafka: KafkaSettings, timeout_s: float = REACH_TIMEOUT_S) -> None:
    """Check that one of Kafka's bootstrap servers accepts a connection, with TLS if the settings say so.

    Call it before you create a kafka-python client: a client that cannot connect leaves its thread behind. The
    servers are tried one after the other, each for at most `timeout_s` seconds. The connection is closed again.

    Raises:
        BackboneUnreachable: no server accepts a connection.
        SettingsError: a certificate or key for TLS cannot be used.
    """
    last: OSError | None = None
    for address in bootstrap_addresses(kafka):
        last = _refusal(kafka, address, timeout_s)
        if last is None:
            return
    why = tls_trouble(kafka, last) if isinstance(last, ssl.SSLError) else last
    raise BackboneUnreachable(f"Kafka does not answer at {kafka.bootstrap_servers}: {why}") from last


def servers_away(kafka: KafkaSettings, timeout_s: float = REACH_TIMEOUT_S) -> list[str]:
    """Return the bootstrap servers, as `HOST:PORT`, that accept no connection, asked as `reach_kafka` does.

    Raises:
        SettingsError: a certificate or key for TLS cannot be used.
    """
    asked = bootstrap_addresses(kafka)
    return [f"{one[0]}:{one[1]}" for one in asked if _refusal(kafka, one, timeout_s) is not None]


def _refusal(kafka: KafkaSettings, address: tuple[str, int], timeout_s: float) -> OSError | None:
    """Return why a server accepts no connection; None: it does."""
    context = kafka_context(kafka)
    try:
        with socket.create_connection(address, timeout=timeout_s) as plain:
            if context is not None:
                context.wrap_socket(plain, server_hostname=address[0]).close()
    except OSError as error:
        return error
    return None


@contextmanager
def _client(kafka: KafkaSettings, client_class: Any, **options: Any) -> Iterator[Any]:
    """Open a client of kafka-python. Raises BackboneUnreachable, also for failures inside the block."""
    reach_kafka(kafka)
    timeout_ms = int(REACH_TIMEOUT_S * 1000)
    try:
        with closing(
            client_class(**client_options(kafka), bootstrap_timeout_ms=timeout_ms, **options)
        ) as client:
            yield client
    except KafkaError as error:
        raise unreachable(kafka, error) from error


def admin_client(kafka: KafkaSettings) -> AbstractContextManager[Any]:
    """Return a context manager that opens a kafka-python admin client and closes it at the end of the block.

    It connects when the block begins, and waits about 10 s for an answer.

    Raises:
        BackboneUnreachable: Kafka does not answer, or a Kafka error was raised inside the block.
    """
    timeout_ms = int(REACH_TIMEOUT_S * 1000)
    return _client(kafka, KafkaAdminClient, client_id="trunkline-topic", request_timeout_ms=timeout_ms)


def topic_config(kafka: KafkaSettings) -> dict[str, str]:
    """Return the configuration that the log's topic must have, as Kafka's option names with their values.

    With it, Kafka sets each record's time at the append, never deletes records and limits their size.
    """
    return {
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "cleanup.policy": "delete",
        "max.message.bytes": str(kafka.record_limit_bytes),
        "min.insync.replicas": str(kafka.wanted_in_sync_replicas),
    }


def stored_config(admin: Any, kafka: KafkaSettings) -> Any:
    """Return the configuration of the log's topic in Kafka, by name, each with its `value`.

    Raises:
        TrunklineError: The user of the login may not describe it.
    """
    resource = ConfigResource(ConfigResourceType.TOPIC, kafka.topic)
    found = admin.describe_configs([resource], config_filter="all")["topic"][kafka.topic]
    if "message.timestamp.type" not in found:
        raise TrunklineError(
            f"Kafka does not show the configuration of topic {kafka.topic!r}: its user lacks the right to "
            f"describe configs ({RIGHTS_PAGE})"
        )
    return found


def check_topic(settings: Settings) -> int:
    """Check that the log's topic in Kafka exists and agrees with the settings. Call it when a program starts.

    It compares the partition count, the epoch, the timestamp type and the limit for a record's size. Nothing is
    changed or created. Partitions that were added to the topic do no harm: every program hashes by the number
    in the topic's first record, and reads and writes no partition beyond it.

    Returns:
        The number of partitions that the topic has: `kafka.partitions` or more.

    Raises:
        BackboneUnreachable: Kafka does not answer, reported within about 10 s.
        TopicMissingError: There is no such topic; LogLostError if the ledger has its records.
        TopicMismatchError: Topic and settings differ; LogUnfinishedError while the log is being rebuilt.
        SettingsError: A certificate, a key or the password for Kafka cannot be used.
    """
    kafka = settings.kafka
    with admin_client(kafka) as admin:
        count = partition_count(admin, kafka.topic)
        if count is None:
            with suppress(OSError):  # without access to the tables, report the missing topic
                check_log_is_not_lost(settings)
            raise TopicMissingError(
                f"Kafka has no topic {kafka.topic!r}; './trunkline log create' makes it, and in the stack's "
                "own Kafka './trunkline up'"
            )
        differing = TopicMismatchError(
            f"kafka.partitions is {kafka.partitions}, but topic {kafka.topic!r} has {count} partitions; "
            + _GROWING
        )
        if count < kafka.partitions:
            raise differing
        stored = stored_config(admin, kafka)
    if stored["message.timestamp.type"]["value"] == REBUILDING_TIMESTAMPS:
        raise LogUnfinishedError(
            f"topic {kafka.topic!r} has message.timestamp.type={REBUILDING_TIMESTAMPS}: './trunkline log "
            "rebuild' has not finished with it; run that again. If it never ran, set LogAppendTime by Kafka's "
            "own tools (kafka-configs --alter)"
        )
    for name in ("message.timestamp.type", "max.message.bytes"):
        wanted, found = topic_config(kafka)[name], str(stored[name]["value"])
        if wanted != found:
            raise TopicMismatchError(
                f"topic {kafka.topic!r} has {name}={found}, the settings want {wanted}; set it with Kafka's "
                "own tools (kafka-configs --alter) or change the settings"
            )
    try:
        _check_topology(kafka)
    except (TopicMissingError, TopicMismatchError):
        # By another number of partitions, the first record is looked for in the wrong one.
        if count != kafka.partitions:
            raise differing from None
        raise
    return count


def check_log_is_not_lost(settings: Settings) -> None:
    """Check that the ledger is empty before a missing topic is created. Returns if there is no ledger, too.

    If the ledger has rows, Kafka's data was lost. In a new topic, new records would get offsets that other
    records in the ledger already have.

    Raises:
        LogLostError: the ledger has rows. The message says how to rebuild the log.
        OSError: the ledger cannot be read.
    """
    from schemas.tables.delta_files import (
        has_rows,  # a late import: most programs that check the topic need no tables
    )

    path = settings.table_path(LEDGER)
    if has_rows(path):
        raise LogLostError(
            f"Kafka has no topic {settings.kafka.topic!r}, and the ledger at {path} has records of it: "
            "Kafka's data was lost, or data_dir is that of another log. './trunkline log rebuild' makes the "
            "log again from the ledger, with Kafka alone running (./trunkline up --only kafka)"
        )


def _check_topology(kafka: KafkaSettings) -> None:
    found = _first_record(kafka, partition_for(TOPOLOGY_STREAM.encode(), kafka.partitions))
    if found is None:
        raise TopicMissingError(
            f"topic {kafka.topic!r} does not say its partition count and epoch: "
            "its first record is missing; './trunkline log create' stores it in an empty topic"
        )
    headers = dict(found.headers)
    if found.key != TOPOLOGY_STREAM.encode() or headers.get("ce_type") != CONTROL_TOPOLOGY.encode():
        raise TopicMismatchError(
            f"topic {kafka.topic!r} does not begin with a {CONTROL_TOPOLOGY} record: it is not a topic of "
            "Trunkline's; choose another kafka.topic"
        )
    try:
        body = orjson.loads(found.value)
        stored = (body["partitions"], body["epoch"])
    except (ValueError, KeyError, TypeError):
        raise TopicMismatchError(f"the first record of topic {kafka.topic!r} cannot be read") from None
    if stored != (kafka.partitions, kafka.epoch):
        raise TopicMismatchError(
            f"topic {kafka.topic!r} was made with partitions={stored[0]} and epoch={stored[1]}, the settings "
            f"say partitions={kafka.partitions} and epoch={kafka.epoch}; {_GROWING}"
        )


def partition_count(admin: Any, topic: str) -> int | None:
    """Return the number of partitions of a Kafka topic, or None when the topic does not exist.

    `admin` is the client that `admin_client` opens. Raises BackboneUnreachable when Kafka cannot answer, such
    as while it starts.
    """
    (described,) = admin.describe_topics([topic])
    error_code = described["error_code"]
    if error_code == UnknownTopicOrPartitionError.errno:
        return None
    if error_code:
        raise BackboneUnreachable(f"Kafka does not say whether there is a topic {topic!r}: error {error_code}")
    return len(described["partitions"])


@contextmanager
def topic_reader(kafka: KafkaSettings, partitions: list[int] | None = None) -> Iterator[Any]:
    """Open a kafka-python consumer that reads the log's topic from its beginning. Use it in a `with` block.

    The consumer has no group and commits no offsets. It is closed at the end of the block.

    Args:
        kafka: the settings of Kafka.
        partitions: the partitions to read. None means all.

    Raises:
        BackboneUnreachable: Kafka does not answer, or a Kafka error was raised inside the block.
    """
    wanted = range(kafka.partitions) if partitions is None else partitions
    assigned = [TopicPartition(kafka.topic, number) for number in wanted]
    with _client(
        kafka,
        KafkaConsumer,
        client_id="trunkline-reader",
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=100,
        max_partition_fetch_bytes=max(1024 * 1024, kafka.record_limit_bytes),
    ) as consumer:
        consumer.assign(assigned)
        consumer.seek_to_beginning(*assigned)
        yield consumer


def _first_record(kafka: KafkaSettings, partition: int) -> Any | None:
    """Return the first record of a partition, or None when it is empty. Raises BackboneUnreachable."""
    with topic_reader(kafka, [partition]) as consumer:
        (assigned,) = consumer.assignment()
        if consumer.end_offsets([assigned])[assigned] == 0:
            return None
        deadline = time.monotonic() + REACH_TIMEOUT_S
        while time.monotonic() < deadline:
            for batch in consumer.poll(timeout_ms=500, max_records=1).values():
                return batch[0]
    raise BackboneUnreachable(f"Kafka at {kafka.bootstrap_servers} hands out no records of {kafka.topic!r}")
