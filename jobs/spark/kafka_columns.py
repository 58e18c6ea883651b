"""Kafka records as flat columns, on their way from Spark's Kafka source to the fold in Python."""

from __future__ import annotations

import base64
import json
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from schemas.wire.record import STANDARD_HEADERS, Record

RECORD_COLUMNS: Final = (
    "topic",
    "partition",
    "offset",
    "timestamp",
    "key",
    "value",
    "usual_headers",
    "odd_headers",
)
SEPARATOR: Final = b"\x1f"


def record_columns(records: DataFrame) -> DataFrame:
    """Return the Kafka records with the columns RECORD_COLUMNS: their headers are in two flat columns.

    If a record has exactly the standard headers, `usual_headers`
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
        "usual_headers": F.when(usual, F.concat(*separated)),
        "odd_headers": F.when(~usual, F.to_json("headers")),
    }
    return records.withColumns(columns).select(*RECORD_COLUMNS)


def records_of(batch: pa.RecordBatch) -> list[Record]:
    """Return the Kafka records in a batch, one for each row, in the same order.

    The batch has the columns RECORD_COLUMNS, as `record_columns` makes them.
    """
    columns = {name: batch.column(name) for name in RECORD_COLUMNS}
    columns["timestamp"] = columns["timestamp"].cast(pa.int64())
    cells = zip(*(column.to_pylist() for column in columns.values()), strict=True)
    return [
        Record(topic, partition, offset, moment, key, value, *names_and_values(usual, odd))
        for topic, partition, offset, moment, key, value, usual, odd in cells
    ]


def names_and_values(usual: bytes | None, odd: str | None) -> tuple[tuple[str, ...], tuple[bytes | None, ...]]:
    """Return the names and the values of a record's headers, as two tuples of the same length.

    Args:
        usual: The cell `usual_headers`: values of the standard headers, separated by SEPARATOR. None: see
            `odd`.
        odd: The cell `odd_headers`: other headers as a JSON list. None for both: the record has no headers.
    """
    if usual is not None:
        return STANDARD_HEADERS, tuple(usual.split(SEPARATOR))
    pairs = [] if odd is None else json.loads(odd)
    values = (pair.get("value") for pair in pairs)
    return (
        tuple(pair.get("key", "") for pair in pairs),
        tuple(None if value is None else base64.b64decode(value) for value in values),
    )
