"""The Spark types of all data that jobs read, exchange and write. The only module of schemas with pyspark."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
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

# A data file of the ledger before its commit: path below the table, size in bytes, Delta's statistics as JSON,
# and the Merkle roots of its rows (schemas/integrity/audit_chain.py).
LEDGER_FILE: Final = StructType(
    [
        StructField("path", StringType(), nullable=False),
        StructField("size", LongType(), nullable=False),
        StructField("statistics", StringType(), nullable=False),
        StructField("roots", StringType(), nullable=False),
    ]
)

# The state of one bucket: for each stream its state (msgpack), and one row about the bucket itself.
STREAM_KEY: Final = StructType([StructField("stream", StringType(), nullable=False)])
STREAM_ENTRIES: Final = StructType([StructField("entries", BinaryType(), nullable=False)])
BUCKET_STATE: Final = StructType([StructField("last_offset", LongType(), nullable=False)])
