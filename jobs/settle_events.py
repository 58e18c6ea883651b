"""Settles `trunk.events` into the Delta table `ledger`: the fold, run by Spark, exactly once.

Reads: every record of the Kafka topic, from its beginning.
Owns: the table `ledger` and the checkpoint `settle_events`; nobody else writes them.
Guarantees: one row for each record, whatever its bytes; one commit a micro-batch; a record is settled after
all records of its stream before it, once, also across kill -9.
On restart: goes on from the checkpoint; a micro-batch that was in the table already is settled again for
the state's sake and not written again.

Run it with spark-submit; settings as everywhere (conf/trunkline.yaml, TRUNKLINE__… variables).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from pydantic import SecretStr
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from jobs.once_sink import OnceSink
from jobs.record_packing import RECORD_COLUMNS, SEPARATOR, pack_records, unpack_rows
from jobs.settling import SettleStreams
from schemas.errors import TrunklineError
from schemas.event_topic import check_topic
from schemas.ledger import LEDGER
from schemas.record import STANDARD_HEADERS
from schemas.sealing import Keyring, load_keyring
from schemas.settings import MASTER_KEY_VARIABLE, Settings, SettingsError, load_settings
from schemas.spark_types import LEDGER_SPARK, PACKED_RECORDS, PACKED_ROWS

QUERY_NAME = "settle_events"
_SPREAD = 64
_POLL_S = 0.2


def bucket_key(partition: int) -> int:
    """The state's key for a Kafka partition. It depends on the partition alone, for ever: the checkpoint
    holds the state under it.

    Spark places an integer key by Murmur3, and small consecutive integers often meet in one shuffle
    partition. The key is the first integer from 1,024 times the partition on whose hash ends like the
    partition's number, so that 2, 4, … 64 shuffle partitions get equal shares.
    """
    candidate = partition * _SPREAD * 16
    while spark_hash(candidate) % _SPREAD != partition % _SPREAD:
        candidate += 1
    return candidate


def spark_hash(number: int) -> int:
    """Spark's `hash()` of one 32-bit integer: Murmur3 x86 32-bit with seed 42, unsigned."""
    mask = 0xFFFFFFFF
    k = number * 0xCC9E2D51 & mask
    k = ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask
    h = 42 ^ k
    h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    h ^= 4
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def read_records(
    spark: SparkSession, settings: Settings, options: Mapping[str, str] | None = None
) -> DataFrame:
    """The topic as a stream, from its beginning, with the headers. `options`: more of Spark's Kafka source."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.kafka.bootstrap_servers)
        .option("subscribe", settings.kafka.topic)
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("failOnDataLoss", "true")
        # A fetch that has reached the log's end waits this long for more: 500 ms by default, which the last
        # micro-batch of a catch-up spends twice.
        .option("kafka.fetch.max.wait.ms", "50")
        .option("maxOffsetsPerTrigger", str(settings.spark.max_offsets_per_trigger))
        .options(**(options or {}))
        .load()
    )


def settle_frame(
    records: DataFrame, settings: Settings, keyring_source: Callable[[], Keyring] | None = None
) -> DataFrame:
    """The ledger rows of a stream of Kafka records. `keyring_source` is called in each worker."""
    processor = SettleStreams(keyring_source or functools.partial(worker_keyring, settings.key_file))
    return (
        bucketed(records, settings)
        .mapInArrow(pack_records, PACKED_RECORDS)
        .groupBy("bucket")
        .transformWithStateInPandas(processor, PACKED_ROWS, outputMode="Append", timeMode="None")
        .mapInArrow(unpack_rows, LEDGER_SPARK)
    )


def bucketed(records: DataFrame, settings: Settings) -> DataFrame:
    """The records with their bucket, and their headers in flat columns.

    Spark asks after each record how large the Arrow batch has become, and for a list column that costs as
    much as the batch is long. So the usual headers travel as one binary cell, `usual_headers`: their values,
    separated; and what is not usual (other names, a value missing, a value with the separator in it) as
    JSON, `odd_headers`. A record without headers has neither.
    """
    keys = [F.lit(bucket_key(partition)) for partition in range(settings.kafka.partitions)]
    separator = F.lit(SEPARATOR)
    values = [F.get(F.col("headers"), F.lit(i))["value"] for i in range(len(STANDARD_HEADERS))]
    names_are_usual = F.col("headers.key") == F.array(*[F.lit(name) for name in STANDARD_HEADERS])
    usual = F.coalesce(names_are_usual & ~F.contains(F.concat(*values), separator), F.lit(False))
    separated = [part for value in values for part in (separator, value)][1:]
    columns: dict[str, Column] = {
        "bucket": F.element_at(F.array(*keys), F.col("partition") + 1),
        "usual_headers": F.when(usual, F.concat(*separated)),
        "odd_headers": F.when(~usual, F.to_json("headers")),
    }
    return records.withColumns(columns).select("bucket", *RECORD_COLUMNS)


def worker_keyring(key_file: Path) -> Keyring:
    """The keyring, read in the worker's own process: a key is never part of a serialized task."""
    secret = os.environ.get(MASTER_KEY_VARIABLE)
    return load_keyring(Settings(master_key_file=key_file, master_key=SecretStr(secret) if secret else None))


def start(
    spark: SparkSession,
    settings: Settings,
    *,
    available_now: bool = False,
    after_batch: Callable[[int], None] | None = None,
) -> StreamingQuery:
    """Start the query. `available_now`: it ends when all that is in the topic is settled. `after_batch` is
    called with a micro-batch's id when it is in the table and Spark does not know it yet.
    """
    sink = OnceSink(settings.table_path(LEDGER), after_batch)
    writer = (
        settle_frame(read_records(spark, settings), settings)
        .writeStream.queryName(QUERY_NAME)
        .option("checkpointLocation", f"{settings.checkpoints_root}/{QUERY_NAME}")
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


def is_ready(query: StreamingQuery) -> bool:
    """Whether the query has read its sources and waits for records, or has settled some."""
    return query.lastProgress is not None or query.status["message"] == "Waiting for data to arrive"


def main() -> int:
    """Run until SIGTERM or SIGINT, or until the query fails. Exit codes as everywhere; 1: the query failed."""
    try:
        settings = load_settings()
        load_keyring(settings)
        check_topic(settings)
    except (SettingsError, TrunklineError) as error:
        print(f"settle_events: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else error.exit_code
    spark = SparkSession.builder.appName(QUERY_NAME).getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", settings.spark.shuffle_partitions)
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    ready_file = os.environ.get("TRUNKLINE_READY_FILE")
    query = start(spark, settings)
    try:
        while query.isActive and not stopping.wait(_POLL_S):
            if ready_file and is_ready(query):
                Path(ready_file).touch()
                ready_file = None
        query.stop()
        failure = query.exception()
    finally:
        spark.stop()
    if failure is not None:
        print(f"settle_events: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
