"""Creates the one Kafka topic, with its first records, reports its replicas, and keeps a publisher for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from kafka.admin import NewTopic  # type: ignore[import-untyped]
from kafka.errors import InvalidReplicationFactorError, TopicAlreadyExistsError  # type: ignore[import-untyped]

from connectors.log.kafka_libraries import repair_kafka_client, to_record
from connectors.log.publisher import Publisher
from schemas.keys.record_macs import GATEWAY, load_mac_key
from schemas.keys.sealing import Keyring, load_keyring
from schemas.log_access.event_topic import (
    REACH_TIMEOUT_S,
    TopicMismatchError,
    TopicMissingError,
    admin_client,
    check_log_is_not_lost,
    check_topic,
    partition_count,
    stored_config,
    topic_config,
    topic_reader,
)
from schemas.settings.settings import KafkaSettings, Settings
from schemas.streams.control.control_fold import CONTROL_TOPOLOGY, Topology
from schemas.streams.control.record_macs import MACS_REQUIRED, macs_required_records
from schemas.streams.fold import has_valid_mac
from schemas.tables.ledger import LEDGER
from schemas.wire.record import BadEnvelopeError, Record, read_envelope
from trunkline_agent.errors import BackboneUnreachable

# Several callers of `ensure_topic` at once may each have appended the first records.
_FIRST: Final = 16


@dataclass(frozen=True)
class Replication:
    """The state of the topic's replicas.

    Attributes:
        replicas: The smallest number of replicas that a partition has.
        min_in_sync: With fewer replicas in sync, Kafka refuses records.
        missing: The number of replicas in sync for each partition where some are not in sync.
    """

    replicas: int
    min_in_sync: int
    missing: Mapping[int, int]

    @property
    def refusing(self) -> list[int]:
        """The numbers of the partitions that accept no records now, because too few replicas are in sync."""
        return [number for number, in_sync in self.missing.items() if in_sync < self.min_in_sync]


def replication(kafka: KafkaSettings) -> Replication:
    """Ask Kafka for the topic's replicas and return their state.

    Raises:
        BackboneUnreachable: Kafka does not answer.
        TopicMissingError: There is no topic.
    """
    repair_kafka_client()  # some brokers may be away
    with admin_client(kafka) as admin:
        if partition_count(admin, kafka.topic) is None:
            raise TopicMissingError(f"Kafka has no topic {kafka.topic!r}; run ./trunkline log create")
        (described,) = admin.describe_topics([kafka.topic])
        stored = stored_config(admin, kafka)
    partitions = sorted(described["partitions"], key=itemgetter("partition_index"))
    return Replication(
        replicas=min(len(one["replica_nodes"]) for one in partitions),
        min_in_sync=int(stored["min.insync.replicas"]["value"]),
        missing={
            one["partition_index"]: len(one["isr_nodes"])
            for one in partitions
            if len(one["isr_nodes"]) < len(one["replica_nodes"])
        },
    )


def controllers(kafka: KafkaSettings) -> int:
    """Ask Kafka how many of its nodes vote for the controller. At an authorizer this needs a right of its own.

    Raises:
        BackboneUnreachable: Kafka does not answer, or lacks a majority.
    """
    repair_kafka_client()
    with admin_client(kafka) as admin:
        (topic,) = admin.describe_metadata_quorum()["topics"]
    return len(topic["partitions"][0]["current_voters"])


def ensure_topic(settings: Settings) -> bool:
    """Create the topic if it is missing, with its first records, and check its settings.

    The first records are the topology, and in each partition `control.macs_required`. Several callers may run
    at once: one of them creates the topic, and first records that come twice are duplicates.

    Returns:
        Whether this call created the topic.

    Raises:
        LogLostError: The topic is missing, but the ledger has its records.
        TrunklineError: Kafka is unreachable, or the topic does not fit the settings.
        SettingsError: There are no master keys, by which the first records are authenticated.
    """
    was_made = False
    kafka = settings.kafka
    # Before a topic is made that then would have no first records.
    load_mac_key(settings, GATEWAY)
    repair_kafka_client()
    with admin_client(kafka) as admin:
        if partition_count(admin, kafka.topic) is None:
            check_log_is_not_lost(settings)
        topic = NewTopic(
            kafka.topic, kafka.partitions, kafka.replication_factor, topic_configs=topic_config(kafka)
        )
        try:
            admin.create_topics([topic])
            was_made = True
        except TopicAlreadyExistsError:
            pass
        except InvalidReplicationFactorError as error:
            raise BackboneUnreachable(
                f"fewer than {kafka.replication_factor} brokers of Kafka are there, and topic {kafka.topic!r} "
                "shall have a copy on each of as many (kafka.replication_factor): start the others"
            ) from error
        admin.wait_for_topics([kafka.topic], timeout_ms=int(REACH_TIMEOUT_S * 1000))
        count = partition_count(admin, kafka.topic)
    if count == kafka.partitions and _is_empty(kafka):
        append_first_records(settings)
    check_topic(settings)
    return was_made


def append_first_records(settings: Settings) -> None:
    """Append the topology and the requirement of MACs to an empty topic. Raises as `ensure_topic`."""
    kafka = settings.kafka
    first = (
        Topology(partitions=kafka.partitions, epoch=kafka.epoch).record(door="stack", principal="operator"),
        *macs_required_records(kafka.partitions),
    )
    with Publisher(settings) as publisher:
        for append in [publisher.append(record) for record in first]:
            append.result(kafka.delivery_timeout_s)


def check_first_records(settings: Settings) -> None:
    """Check that a process of this installation made the topic, unless the ledger has records of it.

    Anybody with the login at Kafka can make the topic first, and append records without MACs. They would count,
    because records before `control.macs_required` need none. So each partition must begin with this record, or
    be empty. Only the topology may come before it.

    Raises:
        TopicMismatchError: Other records are in front, or the first ones have no valid MAC.
        BackboneUnreachable: Kafka does not answer.
        SettingsError: There are no master keys.
        OSError: The ledger cannot be read.
    """
    from schemas.tables.delta_files import has_rows  # a late import: few programs need tables for this

    if has_rows(settings.table_path(LEDGER)):
        return
    keyring = load_keyring(settings)
    wrong = [n for n, found in _first_records(settings.kafka).items() if not _begins_with_macs(found, keyring)]
    if wrong:
        topic = settings.kafka.topic
        raise TopicMismatchError(
            f"topic {topic!r} has records in front of its {MACS_REQUIRED}, or that is not by the "
            f"keys in {settings.key_file}, in partition {', '.join(map(str, sorted(wrong)))}; and no ledger "
            "knows them. Another program may have made the topic: delete it (kafka-topics --delete), or "
            "choose another kafka.topic. If it is a log of yours, copy the file of its master keys to this "
            "machine, and for a log from before MACs set data_dir or storage.tables to its tables"
        )


def _begins_with_macs(records: list[Record], keyring: Keyring) -> bool:
    """Return whether the first records require MACs in their partition. A partition may also be empty."""
    for record in records:
        try:
            envelope = read_envelope(record)
        except BadEnvelopeError:
            return False
        is_first = envelope.type in (CONTROL_TOPOLOGY, MACS_REQUIRED)
        if not is_first or not has_valid_mac(record, envelope, keyring):
            return False
        if envelope.type == MACS_REQUIRED:
            return True
    return not records


def _first_records(kafka: KafkaSettings) -> dict[int, list[Record]]:
    """Return the first records of each partition, at least 16 if there are as many."""
    repair_kafka_client()
    deadline = time.monotonic() + REACH_TIMEOUT_S
    with topic_reader(kafka) as consumer:
        ends = consumer.end_offsets(sorted(consumer.assignment()))
        found: dict[Any, list[Record]] = {where: [] for where in ends}
        while consumer.assignment() - consumer.paused():
            if time.monotonic() > deadline:
                raise BackboneUnreachable(f"Kafka at {kafka.bootstrap_servers} hands out no first records")
            for where, end in ends.items():
                if len(found[where]) >= _FIRST or consumer.position(where) >= end:
                    consumer.pause(where)
            for where, batch in consumer.poll(timeout_ms=200).items():
                found[where] += map(to_record, batch)
    return {where.partition: records for where, records in found.items()}


def _is_empty(kafka: KafkaSettings) -> bool:
    with topic_reader(kafka) as consumer:
        ends = consumer.end_offsets(sorted(consumer.assignment()))
    return all(offset == 0 for offset in ends.values())


class RenewingPublisher:
    """A holder of one publisher, which `live` replaces after a failure. Thread-safe; end it with `close`.

    `signer` is as for `Publisher`. Records wait `linger_ms` for others. The end of a publisher waits `close_s`
    seconds for acknowledgements.
    """

    def __init__(self, settings: Settings, *, signer: str, close_s: float, linger_ms: int = 0) -> None:
        self._settings = settings
        self._signer = signer
        self._linger_ms = linger_ms
        self._close_s = close_s
        self._lock = threading.Lock()
        self._current: Publisher | None = None

    def live(self) -> Publisher:
        """Return a publisher that has not failed. If there is none, check the topic and open a new one.

        The holder closes the publisher, not the caller. Call `live` again after an append has failed.

        Raises:
            BackboneUnreachable: Kafka cannot be reached within 10 s.
            TrunklineError: the topic does not fit the settings.
        """
        with self._lock:
            if self._current is not None and self._current.failed:
                self._end()
            if self._current is None:
                check_topic(self._settings)
                self._current = Publisher(self._settings, signer=self._signer, linger_ms=self._linger_ms)
            return self._current

    def close(self) -> None:
        """Close the current publisher, if there is one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._current is not None:
            publisher, self._current = self._current, None
            publisher.close(self._close_s)
