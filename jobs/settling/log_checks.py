"""Checks of the settling query, at its start and in each micro-batch: it loses and repeats no record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from deltalake import DeltaTable
from pyspark import SparkConf

from jobs.settling.fold_run import OrderError
from schemas.integrity.audit_chain import PartitionRoot
from schemas.log_access.event_topic import REACH_TIMEOUT_S, topic_reader
from schemas.settings.settings import KafkaSettings, Settings
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import BackboneUnreachable, TrunklineError


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


def check_gaps(kafka: KafkaSettings, ends: Mapping[int, int], roots: Iterable[PartitionRoot]) -> None:
    """Check that the first record of each partition in a micro-batch is the next one in Kafka.

    Kafka is asked only about a partition with a gap. The end of a transaction of another program makes one.

    Args:
        kafka: The settings of Kafka.
        ends: The first offset of each partition that is not in the ledger. An absent partition has none there.
        roots: The Merkle roots of the micro-batch.

    Raises:
        OrderError: Kafka has another record in a gap, or no longer has all of the gap.
        BackboneUnreachable: Kafka does not answer.
    """
    for root in roots:
        end = ends.get(root.partition, 0)
        if root.first > end:
            found = _next_record(kafka, root.partition, end)
            if found != root.first:
                raise OrderError(
                    f"{kafka.topic}-{root.partition}: offset {root.first} comes where {end} must follow, and "
                    f"Kafka's next record is {found}; the micro-batch was not committed"
                )


def _next_record(kafka: KafkaSettings, partition: int, offset: int) -> int | None:
    """Return the offset of the first record from `offset` on, or None if Kafka has deleted some of them."""
    deadline = time.monotonic() + REACH_TIMEOUT_S
    with topic_reader(kafka, [partition]) as consumer:
        (at,) = consumer.assignment()
        if consumer.beginning_offsets([at])[at] > offset:
            return None
        consumer.seek(at, offset)
        while time.monotonic() < deadline:
            for batch in consumer.poll(timeout_ms=500, max_records=1).values():
                return int(batch[0].offset)
    raise BackboneUnreachable(
        f"Kafka at {kafka.bootstrap_servers} returns no record of {kafka.topic}-{partition}"
    )
