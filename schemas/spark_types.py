"""The Spark types of everything that jobs read, hand on and write. The only file of schemas with pyspark."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

LEDGER_SPARK: Final = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("partition", IntegerType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("stream_kind", StringType(), nullable=False),
        StructField("stream_id", StringType(), nullable=False),
        StructField("door", StringType()),
        StructField("principal", StringType()),
        StructField("ce_id", StringType()),
        StructField("type", StringType()),
        StructField("seq", LongType()),
        StructField("sent_at", TimestampType()),
        StructField("logged_at", TimestampType(), nullable=False),
        StructField("verdict", StringType(), nullable=False),
        StructField("reason", StringType()),
        StructField("why", StringType()),
        StructField("late", BooleanType(), nullable=False),
        StructField("masked", StringType()),
        StructField("status_after", StringType()),
        StructField("fold_version", IntegerType(), nullable=False),
        StructField("value", BinaryType()),
        StructField("value_sealed", StringType()),
        StructField("changes", StringType()),
        StructField("entries", MapType(StringType(), BinaryType())),
        StructField("accepted_offset", LongType()),
        StructField("wire", StringType()),
    ]
)

# A run of Kafka records of one partition as one Arrow IPC message; `bucket` is the key of the state.
PACKED_RECORDS: Final = StructType(
    [
        StructField("bucket", IntegerType(), nullable=False),
        StructField("first_offset", LongType(), nullable=False),
        StructField("records", BinaryType(), nullable=False),
    ]
)

# A run of ledger rows as one Arrow IPC message.
PACKED_ROWS: Final = StructType([StructField("rows", BinaryType(), nullable=False)])

# The state of one bucket: stream -> its entries (msgpack), and one row about the bucket itself.
STREAM_KEY: Final = StructType([StructField("stream", StringType(), nullable=False)])
STREAM_ENTRIES: Final = StructType([StructField("entries", BinaryType(), nullable=False)])
BUCKET_STATE: Final = StructType([StructField("last_offset", LongType(), nullable=False)])
