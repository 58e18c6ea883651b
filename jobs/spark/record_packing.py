"""Packs Kafka records and ledger rows into single cells as Arrow IPC, on their way to the fold and back.

Spark's stateful operator passes cells to Python one by one, which takes longer than the fold itself. A cell
with thousands of records takes as long as a cell with one (decision 0003 has the figures).
"""

from __future__ import annotations

import base64
import functools
import gc
import json
from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

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


def to_cell(batch: pa.RecordBatch) -> bytes:
    """Return `batch` with its schema as one Arrow IPC stream, for a single cell of a Spark row."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def from_cell(cell: bytes | pa.Buffer) -> pa.RecordBatch:
    """Return the batch that `to_cell` packed.

    Raises:
        pyarrow.ArrowInvalid: `to_cell` did not make these bytes.
    """
    with pa.ipc.open_stream(cell) as reader:
        return reader.read_next_batch()


def pack_records(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pack Kafka records into cells, one for each batch and bucket. Spark's `mapInArrow` calls this.

    Args:
        batches: Rows with the bucket and the record (`bucket` and RECORD_COLUMNS).

    Yields:
        Rows with the bucket, the offset of the first packed record, and the cell with all of them
        (PACKED_RECORDS).
    """
    for batch in batches:
        for bucket in pc.unique(batch.column("bucket")):
            part = batch.filter(pc.equal(batch.column("bucket"), bucket))
            records = part.select(list(RECORD_COLUMNS))
            yield pa.RecordBatch.from_pydict(
                {
                    "bucket": pa.array([bucket.as_py()], pa.int32()),
                    "first_offset": pa.array([records.column("offset")[0].as_py()], pa.int64()),
                    "records": pa.array([to_cell(records)], pa.binary()),
                }
            )
    keep_modules("pack")


def records_of(batch: pa.RecordBatch) -> list[Record]:
    """Return the Kafka records in a batch, one for each row, in the same order.

    The batch has the columns RECORD_COLUMNS, as `pack_records` packs them.
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


@functools.cache
def keep_modules(task: str) -> None:
    """Exclude the objects that this process has now from garbage collection.

    Later objects are collected as usual. The excluded ones are mostly modules that a task has imported.
    pyspark.daemon calls `gc.collect()` at the end of each task. With pyarrow, pandas and the models in memory,
    that takes 100 ms and more in each worker of a micro-batch, and frees almost no memory.

    Args:
        task: Any name for the kind of Spark task, such as "pack". In each process, later calls with the same
            name do nothing.
    """
    gc.collect()
    gc.freeze()
