"""Checks before the settling query starts, so that it loses and repeats no record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltalake import DeltaTable
from pyspark import SparkConf

from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import KafkaSettings, Settings
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import TrunklineError


class StartRefused(TrunklineError):
    """The settling job cannot start without losing or repeating records. Nothing was changed."""


def check_conf(conf: SparkConf) -> None:
    """Raise StartRefused if Spark would run a task twice at the same time (`spark.speculation`).

    Both tasks would bring the same local store forward, and one of them would fail.
    """
    if conf.get("spark.speculation", "false").strip().lower() == "true":
        raise StartRefused("spark.speculation is on: switch it off, because a partition is settled by one task")


def check_ledger_topic(settings: Settings) -> None:
    """Raise StartRefused if the ledger has records of another topic than `settings.kafka.topic`."""
    first = dataset_of(DeltaTable(settings.table_path(LEDGER))).head(1, columns=["topic"])["topic"].to_pylist()
    if first and first[0] != settings.kafka.topic:
        raise StartRefused(
            f"the ledger holds records of topic {first[0]!r}, the settings name {settings.kafka.topic!r}: set "
            "kafka.topic back, or give the new topic a data directory of its own"
        )


def check_log(kafka: KafkaSettings, next_offsets: Mapping[int, int]) -> None:
    """Raise StartRefused unless Kafka still has all records that the ledger lacks.

    Nothing is changed, and None is returned if Kafka has them.

    Args:
        kafka: The settings of Kafka.
        next_offsets: The first offset of each partition that is not in the ledger; 0 for others.

    Raises:
        StartRefused: A partition in Kafka begins after that offset, or ends before it.
        BackboneUnreachable: Kafka does not answer.
    """
    with topic_reader(kafka) as consumer:
        assigned = sorted(consumer.assignment())
        beginnings: dict[Any, int] = consumer.beginning_offsets(assigned)
        ends: dict[Any, int] = consumer.end_offsets(assigned)
    for at in assigned:
        wanted, first, end = next_offsets.get(at.partition, 0), beginnings[at], ends[at]
        where = f"partition {at.partition} of topic {kafka.topic!r}"
        if first > wanted:
            raise StartRefused(
                f"the ledger ends before offset {wanted} of {where}, and Kafka begins at {first}: the records "
                "between were deleted from the log and never settled"
            )
        if end < wanted:
            raise StartRefused(
                f"the ledger has settled {where} up to offset {wanted - 1}, and Kafka ends before {end}: "
                "the log lost records, or the topic was made anew. './trunkline log rebuild' makes the log "
                "again from the ledger"
            )
