"""Checks that Kafka has no record between the ledger's end and the first record of a micro-batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from jobs.settling.fold_run import OrderError
from schemas.integrity.audit_chain import PartitionRoot
from schemas.log_access.event_topic import REACH_TIMEOUT_S, topic_reader
from schemas.settings.settings import KafkaSettings
from trunkline_agent.errors import BackboneUnreachable


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
