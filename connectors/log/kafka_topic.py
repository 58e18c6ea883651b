"""Creates the one Kafka topic, with its first records, and reports the state of its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter

from kafka.admin import ConfigResource, ConfigResourceType, NewTopic  # type: ignore[import-untyped]
from kafka.errors import TopicAlreadyExistsError  # type: ignore[import-untyped]

from connectors.log.publisher import Publisher
from schemas.keys.record_macs import GATEWAY, load_mac_key
from schemas.log_access.event_topic import (
    REACH_TIMEOUT_S,
    TopicMissingError,
    admin_client,
    check_log_is_not_lost,
    check_topic,
    partition_count,
    topic_config,
    topic_reader,
)
from schemas.settings.settings import KafkaSettings, Settings
from schemas.streams.control.control_fold import topology_record
from schemas.streams.control.record_macs import macs_required_records


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
    with admin_client(kafka) as admin:
        if partition_count(admin, kafka.topic) is None:
            raise TopicMissingError(f"Kafka has no topic {kafka.topic!r}; run ./trunkline topic create")
        (described,) = admin.describe_topics([kafka.topic])
        resource = ConfigResource(ConfigResourceType.TOPIC, kafka.topic)
        stored = admin.describe_configs([resource], config_filter="all")["topic"][kafka.topic]
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
    with admin_client(kafka) as admin:
        if partition_count(admin, kafka.topic) is None:
            check_log_is_not_lost(settings)
        topic = NewTopic(
            kafka.topic, kafka.partitions, kafka.replication_factor, topic_configs=topic_config(kafka)
        )
        with suppress(TopicAlreadyExistsError):
            admin.create_topics([topic])
            was_made = True
        admin.wait_for_topics([kafka.topic], timeout_ms=int(REACH_TIMEOUT_S * 1000))
        count = partition_count(admin, kafka.topic)
    if count == kafka.partitions and _is_empty(kafka):
        append_first_records(settings)
    check_topic(settings)
    return was_made


def append_first_records(settings: Settings) -> None:
    """Append the topology and the requirement of MACs to an empty topic. Raises as `ensure_topic`."""
    kafka = settings.kafka
    first = (topology_record(kafka.partitions, kafka.epoch), *macs_required_records(kafka.partitions))
    with Publisher(settings) as publisher:
        for append in [publisher.append(record) for record in first]:
            append.result(kafka.delivery_timeout_s)


def _is_empty(kafka: KafkaSettings) -> bool:
    with topic_reader(kafka) as consumer:
        ends = consumer.end_offsets(sorted(consumer.assignment()))
    return all(offset == 0 for offset in ends.values())
