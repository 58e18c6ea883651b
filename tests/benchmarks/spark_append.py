"""The ledger written by Spark, row by row: a plain copy, and the pipeline before decision 0012."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from jobs.spark.record_packing import from_cell
from schemas.tables.ledger_arrow import LEDGER_ARROW

LEDGER_SPARK: Final = from_arrow_schema(LEDGER_ARROW)


def unpack_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: the ledger batches in the cells of the column `rows`."""
    for batch in batches:
        for cell in batch.column("rows"):
            yield from_cell(cell.as_buffer())


class SparkAppend:
    """`foreachBatch` function: one plain append of ledger rows a micro-batch, not protected from repetition."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Append the rows of `frame`."""
        frame.write.format("delta").mode("append").save(self._path)
