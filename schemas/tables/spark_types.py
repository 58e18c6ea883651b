"""The Spark types of all data that jobs read, exchange and write. The only module of schemas with pyspark."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType


def _columns(**types: DataType) -> StructType:
    """Return the type of rows with these columns, none of which may be null."""
    return StructType([StructField(name, kind, nullable=False) for name, kind in types.items()])


# A data file of the ledger before its commit: path below the table, size in bytes, Delta's statistics as JSON,
# and the Merkle roots of its rows (schemas/integrity/audit_chain.py).
LEDGER_FILE: Final = _columns(path=StringType(), size=LongType(), statistics=StringType(), roots=StringType())
