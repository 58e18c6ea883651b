"""Builds the view tables out of `ledger`: registries, mailbox and `stream_entries`, by the changes in its rows.

Reads: the table `ledger`, as a stream, commit by commit.
Owns: the view tables and the checkpoint `build_views`; one writer at a time, held by a lock (view_lock.py).
Guarantees: each table row is the last state of its key; a registry is never behind the offsets that the
newest commit of `stream_entries` names; what is applied again changes nothing.
On restart: goes on from the progress in the newest commit of `stream_entries`; what is read twice is recognised
by `last_offset`. Each start makes its checkpoint anew: it could only say the same as the tables, or something
else. When a view table is missing, all are first built anew from the ledger.

Spark reads and narrows the new rows, delta-rs merges them in this process (view_tables.py, decision 0009).
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from jobs.rebuild_views import rebuild
from jobs.view_changes import CHANGE_COLUMNS, changes_of
from jobs.view_tables import are_complete, open_tables
from schemas.errors import Refused
from schemas.ledger import LEDGER
from schemas.settings import Settings
from schemas.spark_types import LEDGER_SPARK
from schemas.view_progress import ViewProgress, read_progress
from schemas.views import STREAM_ENTRIES

QUERY_NAME = "build_views"
# Files that a reader may have open are never deleted.
KEEP_AT_LEAST_H = 1.0
SKIPPING_COLUMNS = ("partition", "offset", "logged_at", "verdict")
_BYTES_PER_TRIGGER = "64m"


class ViewSink:
    """`foreachBatch` function that applies each micro-batch to the view tables.

    `lock` is held while tables are written: maintenance takes it to work between micro-batches.
    """

    def __init__(self, settings: Settings) -> None:
        self.lock = threading.Lock()
        self.tables = open_tables(settings)
        self._checkpoint = f"{settings.checkpoints_root}/{QUERY_NAME}"
        self._query_id = ""

    @property
    def progress(self) -> ViewProgress:
        """How far the tables are."""
        return self.tables[STREAM_ENTRIES].progress

    def started(self, query_id: str) -> None:
        """Tell the sink which query it serves."""
        self._query_id = query_id

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Apply the rows of `frame`: first to the registries, last, with the progress, to the entries."""
        rows = frame.toArrow()
        if rows.num_rows == 0:
            return
        version = ledger_version_before(frame.sparkSession, self._checkpoint, batch_id)
        changes = changes_of(rows)
        with self.lock:
            before = self.progress
            offsets = dict(before.offsets)
            for partition, offset in changes.next_offsets.items():
                offsets[partition] = max(offset, offsets.get(partition, 0))
            progress = ViewProgress(offsets, max(version, before.ledger_version), self._query_id, batch_id)
            for name, table in self.tables.items():
                table.apply(changes.tables[name], progress if name == STREAM_ENTRIES else None)


def ledger_version_before(spark: SparkSession, checkpoint: str, batch_id: int) -> int:
    """The newest version of the ledger that is complete in the views when this micro-batch is.

    Spark has written it down before the micro-batch began: the end offset of a Delta source.
    """
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(f"{checkpoint}/offsets/{batch_id}")
    stream = _file_system(spark, checkpoint).open(path)
    try:
        text = str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()
    end = json.loads(text.splitlines()[-1])
    # The version named is the one that is not complete yet.
    return int(end["reservoirVersion"]) - 1


def _file_system(spark: SparkSession, path: str) -> Any:
    jvm: Any = spark._jvm
    session: Any = spark._jsparkSession
    return jvm.org.apache.hadoop.fs.Path(path).getFileSystem(session.sessionState().newHadoopConf())


def discard_checkpoint(spark: SparkSession, settings: Settings) -> None:
    """Delete the checkpoint of an earlier start."""
    jvm: Any = spark._jvm
    checkpoint = f"{settings.checkpoints_root}/{QUERY_NAME}"
    _file_system(spark, checkpoint).delete(jvm.org.apache.hadoop.fs.Path(checkpoint), True)


def read_changes(spark: SparkSession, settings: Settings, seen_version: int) -> DataFrame:
    """What build_views needs of the ledger as a stream: the commits after `seen_version`. Where there is none
    yet, that one is read again, because Spark cannot be told to wait for a version to come.

    Never from a snapshot: its files come in no order, and the progress would run ahead of them.
    """
    newest = DeltaTable(settings.table_path(LEDGER)).version()
    return (
        spark.readStream.format("delta")
        .option("maxBytesPerTrigger", _BYTES_PER_TRIGGER)
        .option("startingVersion", min(seen_version + 1, newest))
        .load(settings.table_path(LEDGER))
        .select(*CHANGE_COLUMNS)
    )


def create_ledger(spark: SparkSession, settings: Settings) -> None:
    """Make an empty ledger where there is none: a stream cannot read a table that does not exist. To be done
    before settle_events runs, whose first append would make the table at the same time, and fail.
    """
    path = settings.table_path(LEDGER)
    if not DeltaTable.is_deltatable(path):
        writer = spark.createDataFrame([], LEDGER_SPARK).write.format("delta").mode("ignore")
        writer.options(**_properties(settings)).save(path)


def set_properties(spark: SparkSession, settings: Settings) -> None:
    """Give the ledger its properties (how long replaced files are kept, statistics) where it has others.
    Only while nothing appends: an append fails when the properties change meanwhile."""
    path, wanted = settings.table_path(LEDGER), _properties(settings)
    if not wanted.items() <= DeltaTable(path).metadata().configuration.items():
        listed = ", ".join(f"'{name}' = '{value}'" for name, value in wanted.items())
        spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({listed})")


def _properties(settings: Settings) -> dict[str, str]:
    # Delta wants the log kept as long as the files; jobs/maintain_tables.py shortens it further.
    kept = f"interval {round(max(KEEP_AT_LEAST_H, settings.views.keep_old_files_h) * 60)} minutes"
    return {
        "delta.deletedFileRetentionDuration": kept,
        "delta.logRetentionDuration": kept,
        # Others write the checkpoints (ledger_checkpoints.py); inside a commit they make the slowest batches.
        "delta.checkpointInterval": "10000",
        # Statistics are what readers skip files by. Their code is generated anew in each task: for all columns
        # that took an eighth of the JVM's time.
        "delta.dataSkippingStatsColumns": ",".join(SKIPPING_COLUMNS),
    }


def prepare(spark: SparkSession, settings: Settings) -> None:
    """Make what must be there before the query starts: a ledger and all view tables. Raises Refused,
    WrongViewTable.
    """
    create_ledger(spark, settings)
    path = settings.table_path(LEDGER)
    if are_complete(settings):
        seen = read_progress(DeltaTable(settings.table_path(STREAM_ENTRIES))).ledger_version
        if seen > DeltaTable(path).version():
            raise Refused(
                f"the views have seen version {seen} of the ledger {path}, which ends before: put the ledger "
                "back, or build the views anew from the one that is there (jobs/rebuild_views.py)"
            )
    else:
        if DeltaTable(path).version() > 0:
            print(
                "build_views: the view tables are not complete; building them from the ledger", file=sys.stderr
            )
        rebuild(settings)


def start(
    spark: SparkSession,
    settings: Settings,
    *,
    available_now: bool = False,
    sink: ViewSink | None = None,
) -> StreamingQuery:
    """Start the query. `available_now`: it ends when all that is in the ledger is in the views. `sink`: one
    that was made after `prepare`; by default it is made here, and both are done. The caller holds the lock,
    if there may be another writer.
    """
    if sink is None:
        prepare(spark, settings)
        sink = ViewSink(settings)
    discard_checkpoint(spark, settings)
    writer = (
        read_changes(spark, settings, sink.progress.ledger_version)
        .writeStream.queryName(QUERY_NAME)
        .option("checkpointLocation", f"{settings.checkpoints_root}/{QUERY_NAME}")
        .outputMode("append")
        .foreachBatch(sink)
    )
    if available_now:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{settings.views.interval_ms} milliseconds")
    query = writer.start()
    sink.started(query.id)
    return query


def catch_up(spark: SparkSession, settings: Settings) -> None:
    """Bring the views to the ledger's end and return. Raises what the query failed with."""
    start(spark, settings, available_now=True).awaitTermination()
