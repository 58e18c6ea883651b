"""The forms that `view_merge` compares, each started beside a running settling query; and known jobs.

`commits`: the real job. `delta-rs`: the same merge, but a streaming query of Spark's reads the ledger.
`spark`: the same reduction, merged by Spark's MERGE with deletion vectors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from jobs.build_views import ViewBuilder, ViewThread
from jobs.views.view_changes import CHANGE_COLUMNS, Changes, Key, RowChange, changes_of, key_columns
from jobs.views.view_tables import open_tables
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.kinds import STREAM_ENTRIES, VIEW_TABLES
from schemas.tables.ledger import LEDGER
from schemas.tables.view_arrow import VIEW_ARROW
from schemas.tables.view_progress import ViewProgress
from schemas.wire.record import OutgoingRecord
from tests.benchmarks.event_load import EVENTS_PER_JOB, event, registrations
from tests.schemas.stream_records import as_read

Stop = Callable[[], None]


def known_jobs(count: int) -> dict[str, dict[Key, RowChange]]:
    """Rows and entries of `count` finished jobs that get no more events: one real job, under many ids."""
    keyring = Keyring({"k": b"k" * 32}, "k")
    entries = Entries()
    kinds = ["started", *["progress"] * (EVENTS_PER_JOB - 2), "completed"]
    records: list[OutgoingRecord] = [*registrations(1, keyring)]
    records += [event(0, seq, kind) for seq, kind in enumerate(kinds, 1)]
    for offset, record in enumerate(records):
        settled = settle(as_read(record, offset, logged_at_us=1, partition=0), entries, keyring, Entries())
    shown = settled.changes[0].row
    assert shown is not None
    row = msgspec.structs.asdict(shown)
    # Sealed secrets and digests: no two entries are alike, and none can be compressed.
    draw = random.Random(1)
    jobs: dict[Key, RowChange] = {}
    stored: dict[Key, RowChange] = {}
    for number in range(count):
        job_id = f"{0xF0000000 + number:08x}"
        jobs[job_id,] = RowChange(0, 0, {**row, "job_id": job_id})
        for name, value in entries.stored().items():
            key = ("job", job_id, name)
            cells = dict(zip(("stream_kind", "stream_id", "entry"), key, strict=True))
            stored[key] = RowChange(0, 0, {**cells, "value": draw.randbytes(len(value)), "fold_version": 2})
    return {REGISTRY_JOBS: jobs, STREAM_ENTRIES: stored}


def nothing(spark: SparkSession, settings: Settings) -> Stop:
    """No views at all."""
    return lambda: None


def changes_stream(spark: SparkSession, settings: Settings, seen_version: int) -> DataStreamWriter:
    """Read the columns of the ledger that build_views needs with a streaming query of Spark."""
    path = settings.table_path(LEDGER)
    newest = DeltaTable(path).version()
    reader = spark.readStream.format("delta").option("startingVersion", min(seen_version + 1, newest))
    writer = reader.load(path).select(*CHANGE_COLUMNS).writeStream
    writer = writer.option("checkpointLocation", (settings.state_path / "spark").as_uri())
    return writer.trigger(processingTime=f"{settings.views.interval_ms} milliseconds")


def query(spark: SparkSession, settings: Settings) -> Stop:
    """A streaming query of Spark's reads, delta-rs merges."""
    tables = open_tables(settings)
    version, offsets = tables[STREAM_ENTRIES].progress.ledger_version, {}

    def apply(frame: DataFrame, batch_id: int) -> None:
        changes = changes_of(frame.toArrow())
        offsets.update(changes.next_offsets)
        for name, table in tables.items():
            progress = ViewProgress(dict(offsets), version) if name == STREAM_ENTRIES else None
            table.apply(changes.tables[name], progress)

    return changes_stream(spark, settings, version).foreachBatch(apply).start().stop


def job(spark: SparkSession, settings: Settings) -> Stop:
    """The job as it is: a thread reads each new commit of the ledger, delta-rs merges."""
    views = ViewThread(settings, ViewBuilder(settings))
    views.start()
    return views.stop


def spark_merge(spark: SparkSession, settings: Settings) -> Stop:
    """A streaming query that merges by Spark, into tables with deletion vectors."""
    version = open_tables(settings)[STREAM_ENTRIES].progress.ledger_version
    spark.conf.set("spark.databricks.delta.merge.materializeSource", "none")
    for name in VIEW_TABLES:
        path = settings.table_path(name)
        rows = DeltaTable(path).to_pyarrow_dataset().to_table(columns=VIEW_ARROW[name].names)
        # PySpark cannot read columns without any chunk, as those of an empty data set are.
        frame = spark.createDataFrame(rows if rows.num_rows else rows.schema.empty_table())
        frame.coalesce(1).write.format("delta").mode("overwrite").option("overwriteSchema", "true").option(
            "delta.enableDeletionVectors", "true"
        ).save(f"{path}.spark")
    offsets: dict[int, int] = {}

    def apply(frame: DataFrame, batch_id: int) -> None:
        changes = changes_of(frame.toArrow())
        offsets.update(changes.next_offsets)
        progress = ViewProgress(dict(offsets), version)
        for name in VIEW_TABLES:
            if changes.tables[name]:
                merge(frame.sparkSession, f"{settings.table_path(name)}.spark", name, changes)
        open_tables_entries.note(progress)

    open_tables_entries = open_tables(settings)[STREAM_ENTRIES]
    return changes_stream(spark, settings, version).foreachBatch(apply).start().stop


def merge(spark: SparkSession, path: str, name: str, changes: Changes) -> None:
    """One MERGE of the changes of one table."""
    rows: list[dict[str, Any]] = [
        {**(change.row or {}), "partition": change.partition, "last_offset": change.offset}
        for change in changes.tables[name].values()
    ]
    source = spark.createDataFrame(pa.Table.from_pylist(rows, VIEW_ARROW[name]))
    source.createOrReplaceTempView(f"changes_{name}")
    same = " AND ".join(f"t.{column} = s.{column}" for column in key_columns(name))
    spark.sql(
        f"MERGE INTO delta.`{path}` t USING (SELECT /*+ BROADCAST */ * FROM changes_{name}) s ON {same} "  # noqa: S608
        "WHEN MATCHED AND s.last_offset > t.last_offset THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )


FORMS: dict[str, Callable[[SparkSession, Settings], Stop]] = {
    "none": nothing,
    "delta-rs": query,
    "commits": job,
    "spark": spark_merge,
}
