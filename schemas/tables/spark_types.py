"""The Spark types of all data that jobs read, exchange and write. The only module of schemas with pyspark."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, StructField, StructType


def _columns(**types: DataType) -> StructType:
    """Return the type of rows with these columns, none of which may be null."""
    return StructType([StructField(name, kind, nullable=False) for name, kind in types.items()])


# A run of Kafka records of one partition as one Arrow IPC message; `bucket` is the key of the state.
PACKED_RECORDS: Final = _columns(bucket=IntegerType(), first_offset=LongType(), records=BinaryType())

# A run of ledger rows as one Arrow IPC message.
PACKED_ROWS: Final = _columns(rows=BinaryType())

# A data file of the ledger before its commit: path below the table, size in bytes, Delta's statistics as JSON,
# and the Merkle roots of its rows (schemas/integrity/audit_chain.py).
LEDGER_FILE: Final = _columns(path=StringType(), size=LongType(), statistics=StringType(), roots=StringType())

# The state of one bucket: for each stream its state (msgpack), and one row about the bucket itself.
STREAM_KEY: Final = _columns(stream=StringType())
STREAM_ENTRIES: Final = _columns(entries=BinaryType())
BUCKET_STATE: Final = _columns(last_offset=LongType())
