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

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from jobs.once_sink import OnceSink
from jobs.record_packing import RECORD_COLUMNS, pack_records, unpack_rows
from jobs.settling import SettleStreams
from schemas.ledger import LEDGER
from schemas.sealing import Keyring, load_keyring
from schemas.settings import Settings, SettingsError, load_settings
from schemas.spark_types import LEDGER_SPARK, PACKED_RECORDS, PACKED_ROWS

QUERY_NAME = "settle_events"
_SPREAD = 64


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


def read_records(spark: SparkSession, settings: Settings) -> DataFrame:
    """The topic as a stream, from its beginning, with the headers."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.kafka.bootstrap_servers)
        .option("subscribe", settings.kafka.topic)
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("failOnDataLoss", "true")
        .option("maxOffsetsPerTrigger", str(settings.spark.max_offsets_per_trigger))
        .load()
    )


def settle_frame(records: DataFrame, settings: Settings) -> DataFrame:
    """The ledger rows of a stream of Kafka records."""
    keys = [F.lit(bucket_key(partition)) for partition in range(settings.kafka.partitions)]
    bucket: Column = F.element_at(F.array(*keys), F.col("partition") + 1)
    processor = SettleStreams(_worker_keyring)
    return (
        records.select(bucket.alias("bucket"), *RECORD_COLUMNS)
        .mapInArrow(pack_records, PACKED_RECORDS)
        .groupBy("bucket")
        .transformWithStateInPandas(processor, PACKED_ROWS, outputMode="Append", timeMode="None")
        .mapInArrow(unpack_rows, LEDGER_SPARK)
    )


def _worker_keyring() -> Keyring:
    # In the worker's own process: the key is never part of a serialized task.
    return load_keyring(load_settings())


def start(spark: SparkSession, settings: Settings, *, available_now: bool = False) -> StreamingQuery:
    """Start the query. `available_now`: stop when all that is in the topic is settled."""
    sink = OnceSink(settings.table_path(LEDGER), _ready_file())
    frame = settle_frame(read_records(spark, settings), settings)
    writer = (
        frame.writeStream.queryName(QUERY_NAME)
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


def _ready_file() -> Callable[[int], None] | None:
    path = os.environ.get("TRUNKLINE_READY_FILE")
    if not path:
        return None

    def ready(batch_id: int) -> None:
        Path(path).touch()

    return ready


def main() -> int:
    """Run until SIGTERM or SIGINT, or until the query fails. Exit 2: a wrong setting; 1: the query failed."""
    try:
        settings = load_settings()
        load_keyring(settings)
    except SettingsError as error:
        print(f"settle_events: {error}", file=sys.stderr)
        return 2
    spark = SparkSession.builder.appName(QUERY_NAME).getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", settings.spark.shuffle_partitions)
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    query = start(spark, settings)
    try:
        while not stopping.is_set() and not query.awaitTermination(1):
            pass
        query.stop()
    except StreamingQueryException as error:
        print(f"settle_events: {error}", file=sys.stderr)
        return 1
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
