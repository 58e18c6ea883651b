"""The sink of a plain copy of the log: Spark writes the ledger's columns, row by row."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from schemas.tables.ledger_arrow import LEDGER_ARROW

LEDGER_SPARK: Final = from_arrow_schema(LEDGER_ARROW)


class SparkAppend:
    """A `foreachBatch` function that appends the ledger rows of each micro-batch with Spark.

    It does not protect against the repetition of a micro-batch.

    Args:
        path: The path or URI of the table.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Append the rows of `frame`."""
        frame.write.format("delta").mode("append").save(self._path)
