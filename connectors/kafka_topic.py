"""Making the one topic, with its topology as the first record."""

from __future__ import annotations

from contextlib import suppress

from kafka.admin import NewTopic  # type: ignore[import-untyped]
from kafka.errors import TopicAlreadyExistsError  # type: ignore[import-untyped]

from connectors.publisher import Publisher
from schemas.control_fold import topology_record
from schemas.event_topic import (
    REACH_TIMEOUT_S,
    admin_client,
    check_topic,
    partition_count,
    topic_config,
    topic_reader,
)
from schemas.settings import KafkaSettings, Settings


def ensure_topic(settings: Settings) -> None:
    """Make the topic where it is missing and store its topology as the first record; then check it.

    Several callers at once do no harm: one creates, and a topology stored twice is a duplicate.
    Raises what `check_topic` raises.
    """
    kafka = settings.kafka
    with admin_client(kafka) as admin:
        topic = NewTopic(
            kafka.topic, kafka.partitions, kafka.replication_factor, topic_configs=topic_config(kafka)
        )
        with suppress(TopicAlreadyExistsError):
            admin.create_topics([topic])
        admin.wait_for_topics([kafka.topic], timeout_ms=int(REACH_TIMEOUT_S * 1000))
        count = partition_count(admin, kafka.topic)
    if count == kafka.partitions and _is_empty(kafka):
        with Publisher(settings) as publisher:
            publisher.append(topology_record(kafka.partitions, kafka.epoch)).result(kafka.delivery_timeout_s)
    check_topic(settings)


def _is_empty(kafka: KafkaSettings) -> bool:
    with topic_reader(kafka) as consumer:
        ends = consumer.end_offsets(sorted(consumer.assignment()))
    return all(offset == 0 for offset in ends.values())
