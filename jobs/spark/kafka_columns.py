"""Kafka records as flat columns, on their way from Spark's Kafka source to the fold in Python."""

from __future__ import annotations

import base64
import json
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from schemas.wire.record import MAC_HEADERS, STANDARD_HEADERS, Record

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

    If a record has exactly the standard headers, or these and its MAC, `usual_headers`
    has their values as one binary cell, separated by SEPARATOR. Other headers (other names, missing values,
    values with the separator) are JSON in `odd_headers`. Both are null for a record without headers.

    Spark computes the size of an Arrow batch again after each record. For a list column, this takes time in
    proportion to the size, so there is none.
    """
    plain, with_mac = _joined(STANDARD_HEADERS), _joined(MAC_HEADERS)
    usual = F.coalesce(plain, with_mac)
    columns: dict[str, Column] = {
        "usual_headers": usual,
        "odd_headers": F.when(usual.isNull(), F.to_json("headers")),
    }
    return records.withColumns(columns).select(*RECORD_COLUMNS)


def _joined(names: tuple[str, ...]) -> Column:
    """Return the values of the headers with exactly these names, separated; null for any other record."""
    separator = F.lit(SEPARATOR)
    values = [F.get(F.col("headers"), F.lit(i))["value"] for i in range(len(names))]
    names_are_these = F.col("headers.key") == F.array(*[F.lit(name) for name in names])
    is_usual = names_are_these & ~F.contains(F.concat(*values), separator)
    separated = [part for value in values for part in (separator, value)][1:]
    return F.when(is_usual, F.concat(*separated))


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
        usual: The cell `usual_headers`: values of the usual headers, separated by SEPARATOR. None: see
            `odd`.
        odd: The cell `odd_headers`: other headers as a JSON list. None for both: the record has no headers.
    """
    if usual is not None:
        values = tuple(usual.split(SEPARATOR))
        return MAC_HEADERS if len(values) == len(MAC_HEADERS) else STANDARD_HEADERS, values
    pairs = [] if odd is None else json.loads(odd)
    return (
        tuple(pair.get("key", "") for pair in pairs),
        tuple(None if one.get("value") is None else base64.b64decode(one["value"]) for one in pairs),
    )
