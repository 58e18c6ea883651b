"""The ledger's data files: each task writes its rows to one Parquet file, beside the rows that came before.

A file is part of the table from the commit that names it (once_sink.py); one whose task failed, or whose
commit never came, is never read, and maintenance deletes it. So nothing but a file's name, statistics
and Merkle roots goes through the JVM: rows went through it twice, and planning their 25 columns took a third
of a micro-batch (decision 0012).
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from jobs.ledger.ledger_roots import FileRoots
from jobs.spark.record_packing import from_cell
from jobs.spark.worker_heap import keep_modules
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger_arrow import LEDGER_ARROW

# What readers skip files by. Who looks for a stream reads all files: its rows are in most of them.
SKIPPING_COLUMNS: Final = ("partition", "offset", "logged_at", "verdict")


class FileStatistics:
    """What the log says of a file: how many rows, and the bounds of SKIPPING_COLUMNS, which are never null."""

    def __init__(self) -> None:
        self._rows = 0
        self._bounds: dict[str, list[Any]] = {name: [] for name in SKIPPING_COLUMNS}

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the rows of `batch`, which has some."""
        self._rows += batch.num_rows
        for name, bounds in self._bounds.items():
            found = pc.min_max(batch.column(name)).as_py()
            bounds += [found["min"], found["max"]]

    def to_json(self) -> str:
        """As in Delta's protocol, "Per-file Statistics". Kafka's times are whole milliseconds, as they must be
        here."""
        return json.dumps(
            {
                "numRecords": self._rows,
                "minValues": {name: _plain(min(bounds)) for name, bounds in self._bounds.items()},
                "maxValues": {name: _plain(max(bounds)) for name, bounds in self._bounds.items()},
                "nullCount": dict.fromkeys(self._bounds, 0),
            }
        )


def _plain(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z"
    return value


def write_file(table: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`, after its first argument: writes the ledger rows in the cells of the column `rows` to
    a file below the path `table`; gives the row of LEDGER_FILE that says which, or none if there are no rows.
    """
    cells = (cell.as_buffer() for batch in batches for cell in batch.column("rows"))
    first = next(cells, None)
    if first is None:
        return
    name, storage = f"part-{uuid.uuid4()}.parquet", table_storage(table)
    statistics, roots = FileStatistics(), FileRoots()
    with (
        storage.open_output_stream(name) as stream,
        parquet.ParquetWriter(stream, LEDGER_ARROW, compression="snappy") as writer,
    ):
        for cell in itertools.chain([first], cells):
            rows = from_cell(cell)
            statistics.add(rows)
            roots.add(rows)
            writer.write_batch(rows)
    size = storage.get_file_info(name).size
    keep_modules("write")
    row = {"path": name, "size": size, "statistics": statistics.to_json(), "roots": roots.to_json()}
    yield pa.RecordBatch.from_pylist([row])
