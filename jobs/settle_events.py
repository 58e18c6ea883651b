"""The job that settles the topic `trunk.events` into the Delta table `ledger`, exactly once, with Spark.

Reads: every record of the Kafka topic, from its beginning.
Owns: the table `ledger` and the checkpoint `settle_events`; no other program writes them.
Guarantees: one row for each record, whatever its bytes, and one commit for each micro-batch. A record is
settled once, after all earlier records of its stream, also across kill -9.
On restart: continues from the checkpoint. A micro-batch that is already in the table is settled again to update
the state, but not written again. Without its checkpoint, the job continues from the ledger and `stream_entries`
(jobs/recovery.py), or refuses with a reason.

jobs/run_streams.py runs it.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from jobs.ledger.ledger_chain import LedgerChain
from jobs.ledger.ledger_files import write_file
from jobs.ledger.ledger_table import prepare_ledger
from jobs.recovery import Recovery, find_start
from jobs.settling.checkpoint_state import CheckpointGuard
from jobs.settling.once_sink import OnceSink
from jobs.settling.settling import SettleStreams
from jobs.spark.record_packing import RECORD_COLUMNS, SEPARATOR, pack_records
from jobs.views.buckets import bucket_column
from schemas.errors import TrunklineError
from schemas.keys.sealing import Keyring, load_keyring
from schemas.log_access.kafka_clients import spark_security
from schemas.settings.settings import MASTER_KEY_VARIABLE, Settings
from schemas.tables.ledger import LEDGER
from schemas.tables.spark_types import LEDGER_FILE, PACKED_RECORDS, PACKED_ROWS
from schemas.wire.record import STANDARD_HEADERS

QUERY_NAME = "settle_events"
_POLL_S = 0.2
# With this trigger, a query is idle for long after its first micro-batch, which comes at once.
_ONE_BATCH = "1 hour"
_Begin = Callable[[DataFrame, Mapping[str, Any]], StreamingQuery]


def read_records(
    spark: SparkSession, settings: Settings, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return the Kafka topic as a streaming frame, with headers, from the topic's beginning.

    `options` are further options of Spark's Kafka source, which replace the usual ones. None: there are none.
    """
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.kafka.bootstrap_servers)
        .options(**spark_security(settings.kafka))
        .option("subscribe", settings.kafka.topic)
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("failOnDataLoss", "true")
        # After each fetch the client sends the next one, which waits at the log's end for more records. Spark's
        # two requests for the partition's bounds wait behind it on the same connection, 500 ms by Kafka's
        # default. Spark only asks for offsets that exist, so the fetch need not wait.
        .option("kafka.fetch.max.wait.ms", "1")
        .option("maxOffsetsPerTrigger", str(settings.spark.max_offsets_per_trigger))
        .options(**(options or {}))
        .load()
    )


def settled_rows(
    records: DataFrame,
    settings: Settings,
    keyring_source: Callable[[], Keyring] | None = None,
    state: GroupedData | None = None,
) -> DataFrame:
    """Return a streaming frame that settles Kafka records and has the resulting ledger rows.

    Each cell has many ledger rows as an Arrow IPC stream (PACKED_ROWS).

    Args:
        records: The stream of records, as `read_records` returns it.
        settings: The settings of Kafka and Spark.
        keyring_source: Returns the master keys, called in each worker process. None: they are read from the key
            file.
        state: The initial state for a new checkpoint. Spark reads it only in a query's first micro-batch. None:
            the state is empty.
    """
    processor = SettleStreams(keyring_source or functools.partial(worker_keyring, settings.key_file))
    return (
        bucketed(records, settings)
        # A map task for each Kafka partition would start a Python worker for each.
        .coalesce(settings.spark.shuffle_partitions)
        .mapInArrow(pack_records, PACKED_RECORDS)
        .groupBy("bucket")
        .transformWithStateInPandas(processor, PACKED_ROWS, "Append", "None", state)
    )


def settle_frame(rows: DataFrame, settings: Settings) -> DataFrame:
    """Return a frame that writes packed ledger rows into data files of the ledger.

    The frame has one row for each file: path, size, statistics and Merkle roots (LEDGER_FILE). The files are
    written when Spark evaluates the frame. OnceSink then adds them to the ledger by a commit.

    Args:
        rows: The frame that `settled_rows` returned.
        settings: The settings with the path of the ledger.
    """
    return rows.mapInArrow(functools.partial(write_file, settings.table_path(LEDGER)), LEDGER_FILE)


def bucketed(records: DataFrame, settings: Settings) -> DataFrame:
    """Return the Kafka records with their bucket, and with their headers in two flat columns.

    The columns are `bucket` and RECORD_COLUMNS. If a record has exactly the standard headers, `usual_headers`
    has their values as one binary cell, separated by SEPARATOR. Other headers (other names, missing values,
    values with the separator) are JSON in `odd_headers`. Both are null for a record without headers.

    Spark computes the size of an Arrow batch again after each record. For a list column, this takes time in
    proportion to the size, so there is none.
    """
    separator = F.lit(SEPARATOR)
    values = [F.get(F.col("headers"), F.lit(i))["value"] for i in range(len(STANDARD_HEADERS))]
    names_are_usual = F.col("headers.key") == F.array(*[F.lit(name) for name in STANDARD_HEADERS])
    usual = F.coalesce(names_are_usual & ~F.contains(F.concat(*values), separator), F.lit(False))
    separated = [part for value in values for part in (separator, value)][1:]
    columns: dict[str, Column] = {
        "bucket": bucket_column(settings.kafka.partitions),
        "usual_headers": F.when(usual, F.concat(*separated)),
        "odd_headers": F.when(~usual, F.to_json("headers")),
    }
    return records.withColumns(columns).select("bucket", *RECORD_COLUMNS)


def worker_keyring(key_file: Path) -> Keyring:
    """Return the master keys, read from `key_file` and the environment of the calling process.

    Spark's Python workers call it. So no key is part of a task that Spark serializes.
    """
    secret = os.environ.get(MASTER_KEY_VARIABLE)
    return load_keyring(Settings(master_key_file=key_file, master_key=SecretStr(secret) if secret else None))


def start(
    spark: SparkSession,
    settings: Settings,
    *,
    available_now: bool = False,
    after_batch: Callable[[int], None] | None = None,
) -> StreamingQuery:
    """Start the settling query and return it. The query runs in Spark's threads until it is stopped.

    The query starts from its checkpoint. Without a checkpoint, it starts from the tables, or from the topic's
    beginning if the ledger has no rows. A start from the tables first brings the views to the ledger's end. So
    the thread that builds the views must not run yet.

    Args:
        spark: The session.
        settings: The settings of the tables, Kafka and Spark.
        available_now: True: the query ends when all current records of the topic are settled. False: it runs
            until it is stopped.
        after_batch: Called with the number of each committed micro-batch, before Spark records its end. None:
            nothing is called.

    Raises:
        TrunklineError: The checkpoint is damaged, a start would lose or repeat records, or Kafka does not
            answer.
    """
    checkpoint = f"{settings.checkpoints_root}/{QUERY_NAME}"
    recovery = find_start(spark, settings, checkpoint)
    prepare_ledger(settings)

    def begin(rows: DataFrame, trigger: Mapping[str, Any]) -> StreamingQuery:
        guard, chain = CheckpointGuard(checkpoint), LedgerChain(settings)
        sink = OnceSink(settings.table_path(LEDGER), after_batch, guard, chain)
        writer = (
            settle_frame(rows, settings)
            .writeStream.queryName(QUERY_NAME)
            .option("checkpointLocation", checkpoint)
            .outputMode("append")
            .foreachBatch(sink)
        )
        query = (writer.trigger(**trigger) if trigger else writer).start()
        sink.started(query.id)
        return query

    if recovery is not None:
        _load(spark, settings, recovery, begin)
    trigger: dict[str, Any] = {}
    if available_now:
        trigger = {"availableNow": True}
    elif settings.spark.trigger_interval_ms:
        trigger = {"processingTime": f"{settings.spark.trigger_interval_ms} milliseconds"}
    return begin(settled_rows(read_records(spark, settings), settings), trigger)


def _load(spark: SparkSession, settings: Settings, recovery: Recovery, begin: _Begin) -> None:
    """Make a new checkpoint from the tables, by a separate run of the query's first micro-batch.

    A run with an initial state would plan it again in each later micro-batch.
    """
    offsets = {"startingOffsets": json.dumps(recovery.starting_offsets(settings.kafka))}
    records = read_records(spark, settings, offsets)
    rows = settled_rows(records, settings, state=recovery.state(spark, settings))
    query = begin(rows, {"processingTime": _ONE_BATCH})
    while query.isActive and query.lastProgress is None:
        time.sleep(_POLL_S)
    query.stop()
    failure = query.exception()
    if failure is not None:
        raise TrunklineError(f"the state could not be loaded from the tables: {failure}")


def is_ready(query: StreamingQuery) -> bool:
    """Return whether the query runs: it has finished a micro-batch, or it waits for records."""
    return query.lastProgress is not None or query.status["message"] == "Waiting for data to arrive"
