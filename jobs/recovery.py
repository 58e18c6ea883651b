"""Decides how the settling job starts: from its checkpoint, from the topic's beginning, or from the tables.

The tables have all the data of a checkpoint: the ledger has the progress, and `stream_entries` has the state of
the streams. So a lost checkpoint is made again from both, each at a pinned version. A start that would settle a
record twice or skip one is refused, and the message says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from deltalake import DeltaTable
from pyspark.sql import GroupedData, SparkSession
from pyspark.sql import functions as F

from jobs.settling.checkpoint_state import Checkpoint, CheckpointFolder
from jobs.settling.initial_state import initial_state
from jobs.settling.once_sink import last_commit
from jobs.views.table_files import read_table
from schemas.errors import TrunklineError
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import KafkaSettings, Settings
from schemas.streams.kinds import STREAM_ENTRIES
from schemas.tables.delta_files import has_rows
from schemas.tables.ledger import LEDGER
from schemas.tables.ledger_arrow import LEDGER_ARROW
from schemas.tables.view_arrow import VIEW_ARROW
from schemas.tables.view_progress import ViewProgress, read_progress


class RecoveryRefused(TrunklineError):
    """The settling job cannot start without losing or repeating records. Nothing was changed."""


class Recovery(NamedTuple):
    """A start of the settling job from the tables, for a lost checkpoint.

    Attributes:
        next_offsets: The first offset of each Kafka partition that is not in the ledger.
        ledger_version: The version of the ledger that has all records below `next_offsets`.
        entries_version: The version of `stream_entries` that has the state of these records.
    """

    next_offsets: dict[int, int]
    ledger_version: int
    entries_version: int

    def starting_offsets(self, kafka: KafkaSettings) -> dict[str, dict[str, int]]:
        """Return the offset at which Spark must start to read, for every partition of the topic.

        The form is that of the option `startingOffsets` of Spark's Kafka source.
        """
        return {
            kafka.topic: {str(number): self.next_offsets.get(number, 0) for number in range(kafka.partitions)}
        }

    def state(self, spark: SparkSession, settings: Settings) -> GroupedData:
        """Return the state of all streams for a new checkpoint, read from the table `stream_entries`.

        The result is grouped by bucket, as Spark's `transformWithState` expects an initial state.
        """
        path = settings.table_path(STREAM_ENTRIES)
        entries = read_table(spark, path, self.entries_version, VIEW_ARROW[STREAM_ENTRIES])
        return initial_state(entries, self.next_offsets, settings.kafka.partitions)


def find_start(spark: SparkSession, settings: Settings, checkpoint: str) -> Recovery | None:
    """Decide how to start the settling query, and prepare the tables for it.

    If the query must start from the tables, the call brings the views to the ledger's end. So the thread that
    builds the views must not run yet. A checkpoint without a finished micro-batch is deleted if the ledger has
    rows, because it may have the state of another start.

    Args:
        spark: The session.
        settings: The settings of the tables and of Kafka.
        checkpoint: The directory of the query's checkpoint.

    Returns:
        The start from the tables. None means that Spark can start by itself: from the checkpoint, or from the
        topic's beginning if there is none.

    Raises:
        CheckpointDamaged: The checkpoint is there but cannot be used.
        RecoveryRefused: A start would lose or repeat records.
        BackboneUnreachable: Kafka does not answer.
        TrunklineError: A table cannot be read.
    """
    folder = CheckpointFolder(spark, checkpoint)
    found = folder.look()
    if found.last_batch is not None:
        _check_agreement(settings, found)
        # Spark would wait for ever for offsets that the log no longer has. The progress of the views is a lower
        # bound of the settled offsets, and does not need a scan of the ledger.
        path = settings.table_path(STREAM_ENTRIES)
        if DeltaTable.is_deltatable(path):
            check_log(settings.kafka, read_progress(DeltaTable(path)).offsets)
        return None
    if not has_rows(settings.table_path(LEDGER)):
        if found.has_files and found.query_id is None:
            folder.discard()
        return None
    print(f"settle_events: no checkpoint at {checkpoint}; starting from the tables", file=sys.stderr)
    recovery = _recovery(spark, settings)
    if found.has_files:
        folder.discard()
    return recovery


def _check_agreement(settings: Settings, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that does not match the ledger: one of a backup, or of a deleted table."""
    assert checkpoint.last_batch is not None  # noqa: S101  for the type checker
    path = settings.table_path(LEDGER)
    committed = last_commit(path)
    if committed is None:
        if has_rows(path):
            # Maintenance may have removed the old part of the table's log, so there is no contradiction.
            return
        found = "has no rows"
    elif committed.query_id != checkpoint.query_id:
        found = f"ends with micro-batch {committed.batch_id} of another checkpoint"
    elif committed.batch_id not in (checkpoint.last_batch, checkpoint.last_batch + 1):
        found = f"ends with micro-batch {committed.batch_id}"
    else:
        # If the ledger is one micro-batch ahead, the job was killed between the two commits.
        return
    raise RecoveryRefused(
        f"the checkpoint {checkpoint.path} does not belong to the ledger as it is: it finished micro-batch "
        f"{checkpoint.last_batch}, the ledger {found}. Put the right ledger back, or delete that directory and "
        "start again: the job then goes on from the tables, or without a ledger from the log's beginning."
    )


def _recovery(spark: SparkSession, settings: Settings) -> Recovery:
    ledger_version = DeltaTable(settings.table_path(LEDGER)).version()
    next_offsets = ledger_ends(spark, settings, ledger_version)
    check_log(settings.kafka, next_offsets)
    # Imported here, because that job may start this one.
    from jobs import build_views

    build_views.catch_up(settings)
    entries = DeltaTable(settings.table_path(STREAM_ENTRIES))
    check_view_progress(read_progress(entries), next_offsets)
    return Recovery(next_offsets, ledger_version, entries.version())


def ledger_ends(spark: SparkSession, settings: Settings, version: int) -> dict[int, int]:
    """Return for each Kafka partition the first offset that is not in the ledger at `version`.

    Partitions without rows in the ledger are left out. Spark reads the offsets of all rows for this.

    Raises:
        RecoveryRefused: An offset below the highest one is missing, the ledger has two rows for an offset, or
            it has records of another topic than `settings.kafka.topic`.
    """
    ledger = read_table(spark, settings.table_path(LEDGER), version, LEDGER_ARROW)
    # Distinct offsets are counted exactly by bitmaps of 32,768 each, so that no row leaves its task.
    buckets = ledger.groupBy("topic", "partition", F.bitmap_bucket_number("offset").alias("bucket")).agg(
        F.count("*").alias("rows"),
        F.bitmap_count(F.bitmap_construct_agg(F.bitmap_bit_position("offset"))).alias("distinct"),
        F.max("offset").alias("last"),
    )
    partitions = buckets.groupBy("topic", "partition").agg(
        F.sum("rows").alias("rows"), F.sum("distinct").alias("distinct"), F.max("last").alias("last")
    )
    ends: dict[int, int] = {}
    for row in partitions.orderBy("topic", "partition").collect():
        where = f"partition {row['partition']} of topic {row['topic']!r}"
        if row["topic"] != settings.kafka.topic:
            raise RecoveryRefused(
                f"the ledger holds {where}, the settings name {settings.kafka.topic!r}: set kafka.topic "
                "back, or give the new topic a data directory of its own"
            )
        if row["rows"] != row["distinct"]:
            raise RecoveryRefused(f"the ledger holds {row['rows'] - row['distinct']} records of {where} twice")
        if row["distinct"] != row["last"] + 1:
            raise RecoveryRefused(
                f"the ledger has a gap: {row['distinct']} of the {row['last'] + 1} records up to offset "
                f"{row['last']} of {where}. {_FROM_THE_LOG}"
            )
        ends[int(row["partition"])] = int(row["last"]) + 1
    return ends


_FROM_THE_LOG: Final = (
    "Put the missing part of the table back from a copy; or move the ledger, the views and all checkpoints "
    "away, and everything is settled again from the log's beginning."
)


def check_log(kafka: KafkaSettings, next_offsets: Mapping[int, int]) -> None:
    """Raise RecoveryRefused unless Kafka still has all records that the ledger lacks.

    Nothing is changed, and None is returned if Kafka has them.

    Args:
        kafka: The settings of Kafka.
        next_offsets: The first offset of each partition that is not in the ledger; 0 for others.

    Raises:
        RecoveryRefused: A partition in Kafka begins after that offset, or ends before it.
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
            raise RecoveryRefused(
                f"the ledger ends before offset {wanted} of {where}, and Kafka begins at {first}: the records "
                "between were deleted from the log and never settled"
            )
        if end < wanted:
            raise RecoveryRefused(
                f"the ledger has settled {where} up to offset {wanted - 1}, and Kafka ends before {end}: "
                "the log lost records, or the topic was made anew. './trunkline log rebuild' makes the log "
                "again from the ledger"
            )


def check_view_progress(progress: ViewProgress, next_offsets: Mapping[int, int]) -> None:
    """Raise RecoveryRefused unless the views contain the same records as the ledger, none less and none more.

    Args:
        progress: The progress that a commit of `stream_entries` has recorded.
        next_offsets: The first offset of each partition that is not in the ledger.
    """
    for partition in sorted(next_offsets.keys() | progress.offsets.keys()):
        seen, settled = progress.offsets.get(partition, 0), next_offsets.get(partition, 0)
        if seen != settled:
            raise RecoveryRefused(
                f"the views have seen partition {partition} up to offset {seen - 1}, the ledger ends at "
                f"{settled - 1}: build the views anew (jobs/rebuild_views.py), then start again"
            )
