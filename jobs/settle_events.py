"""The job that settles the topic `trunk.events` into the Delta table `ledger`, exactly once, with Spark.

Reads: every record of the Kafka topic that is not in the ledger.
Owns: the table `ledger`, its local state stores, and the checkpoint of the running query.
Guarantees: one row for each record, whatever its bytes, and one commit for each micro-batch. A record is
settled once, after all earlier records of its stream, also across kill -9.
On restart: continues at the ledger's end, by a new query. Local stores that lag behind, or are missing, are
brought there from the tables (jobs/settling/partition_task.py, decision 0029).

jobs/run_streams.py runs it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import SecretStr
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from jobs.driver.programs import nobody_else_writes
from jobs.ledger.ledger_table import prepare_ledger
from jobs.settling.fold_run import record_columns
from jobs.settling.ledger_sink import LedgerSink
from jobs.settling.log_checks import StartRefused, check_conf, check_ledger_topic, check_log
from jobs.settling.partition_task import LEDGER_FILE, KeyringSource, StageSettings, settle_partitions
from schemas.keys.sealing import Keyring, load_keyring
from schemas.log_access.kafka_clients import spark_security
from schemas.settings.settings import MASTER_KEY_VARIABLE, Settings
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.ledger import LEDGER

QUERY_NAME = "settle_events"
# A file with the ledger's end at the start, from a start until the end of a run without a failure.
_STARTED_AT = "started_at"
_SPLITTING = ("minpartitions", "maxrecordsperpartition")


def read_records(
    spark: SparkSession, settings: Settings, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return the Kafka topic as a streaming frame, with headers, from the topic's beginning.

    `options` are further options of Spark's Kafka source, which replace the usual ones. None: there are none.

    Raises:
        ValueError: An option would split a Kafka partition among tasks.
    """
    splitting = sorted(name for name in options or {} if name.lower() in _SPLITTING)
    if splitting:
        raise ValueError(f"{splitting} would split a partition among tasks, and one task must settle it")
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.kafka.bootstrap_servers)
        .options(**spark_security(settings.kafka))
        # Not all partitions of the topic: those that were added to it are none of the log's.
        .option("assign", json.dumps({settings.kafka.topic: list(range(settings.kafka.partitions))}))
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


def worker_keyring(key_file: Path) -> Keyring:
    """Return the master keys, read from `key_file` and the environment of the calling process.

    Spark's Python workers call it. So no key is part of a task that Spark serializes.
    """
    secret = os.environ.get(MASTER_KEY_VARIABLE)
    return load_keyring(Settings(master_key_file=key_file, master_key=SecretStr(secret) if secret else None))


def settle_frame(
    records: DataFrame, settings: Settings, keyring_source: KeyringSource = worker_keyring
) -> DataFrame:
    """Return a frame that settles Kafka records and writes their ledger rows into data files.

    The frame has one row for each file: path, size, statistics and Merkle roots (LEDGER_FILE). The files are
    written when Spark evaluates the frame. LedgerSink then adds them to the ledger by a commit.

    Args:
        records: The stream of records, as `read_records` returns it.
        settings: The settings of Kafka, Spark and the tables.
        keyring_source: Returns the master keys in a file, called in each worker process.
    """
    at = StageSettings(
        ledger=settings.table_path(LEDGER),
        stream_entries=settings.table_path(STREAM_ENTRIES),
        stores=settings.state_path / "settling",
        epoch=settings.kafka.epoch,
        key_file=settings.key_file,
    )
    # A task for each Kafka partition would start a Python worker for each.
    columns = record_columns(records).coalesce(settings.spark.tasks)
    return columns.mapInArrow(functools.partial(settle_partitions, at, keyring_source), LEDGER_FILE)


def start(
    spark: SparkSession,
    settings: Settings,
    *,
    available_now: bool = False,
    after_batch: Callable[[int], None] | None = None,
    keyring_source: KeyringSource = worker_keyring,
    check: Callable[[], None] = nobody_else_writes,
) -> StreamingQuery:
    """Start the settling query at the ledger's end, and return it. It runs until it is stopped.

    Args:
        spark: The session.
        settings: The settings of the tables, Kafka and Spark.
        available_now: True: the query ends when all current records of the topic are settled. False: it runs
            until it is stopped.
        after_batch: Called with the number of each committed micro-batch. None: nothing is called.
        keyring_source: Returns the master keys in a file, called in each worker process.
        check: Raises if this process may not write the tables any more.

    Raises:
        Refused: The audit chain is ahead of the ledger, or `check` raises it.
        StartRefused: A start would lose or repeat records.
        BackboneUnreachable: Kafka does not answer.
    """
    check_conf(spark.sparkContext.getConf())
    prepare_ledger(settings, check)
    check_ledger_topic(settings)
    sink = LedgerSink(settings, after_batch)
    check()
    check_log(settings.kafka, sink.ends)
    checkpoint = settings.state_path / "checkpoint"
    _delete_checkpoint(checkpoint)
    _distrust_stores(settings, sink.ends)
    first = {str(number): sink.ends.get(number, 0) for number in range(settings.kafka.partitions)}
    offsets = {"startingOffsets": json.dumps({settings.kafka.topic: first})}
    writer = (
        settle_frame(read_records(spark, settings, offsets), settings, keyring_source)
        .writeStream.queryName(QUERY_NAME)
        .option("checkpointLocation", _hadoop_path(checkpoint))
        .outputMode("append")
        .foreachBatch(sink)
    )
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif settings.spark.trigger_interval_ms:
        writer = writer.trigger(processingTime=f"{settings.spark.trigger_interval_ms} milliseconds")
    query = writer.start()
    sink.started(query.id)
    return query


def _hadoop_path(path: Path) -> str:
    """Return the text by which Hadoop finds this local path: `file:` and the path itself, with no escapes."""
    return f"file://{path}"


def _delete_checkpoint(checkpoint: Path) -> None:
    """Delete the checkpoint of an earlier query. The ledger has the progress, so nobody needs it."""
    try:
        shutil.rmtree(checkpoint)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StartRefused(
            f"the checkpoint {checkpoint} of an earlier run cannot be deleted: delete it, its offsets are old "
            f"({error})"
        ) from error


def trust_stores(settings: Settings) -> None:
    """Let the next start keep the local stores. Call it after a run that was stopped without a failure."""
    (settings.state_path / _STARTED_AT).unlink(missing_ok=True)


def _distrust_stores(settings: Settings, ends: Mapping[int, int]) -> None:
    """Delete the local stores of this machine if the run before this one failed and has committed nothing.

    A page of a damaged store may end the task's process, each time. No task could then say so.
    """
    noted = settings.state_path / _STARTED_AT
    now = json.dumps({str(partition): end for partition, end in sorted(ends.items())})
    if noted.exists() and noted.read_text(encoding="utf-8") == now:
        shutil.rmtree(settings.state_path / "settling", ignore_errors=True)
    settings.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    noted.write_text(now, encoding="utf-8")


def is_ready(query: StreamingQuery) -> bool:
    """Return whether the query runs: it has finished a micro-batch, or it waits for records."""
    return query.lastProgress is not None or query.status["message"] == "Waiting for data to arrive"
