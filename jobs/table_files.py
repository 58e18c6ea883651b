"""A table at one version, for Spark without its Delta extension: deltalake reads the log, Spark the files.

With the extension each micro-batch takes a tenth longer, and only a recovery reads tables (decision 0011).
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

# Spark takes a path for a pattern.
_SPECIAL: Final = re.compile(r"([\\\[\]{}*?])")


def read_table(spark: SparkSession, path: str, version: int, columns: pa.Schema) -> DataFrame:
    """The rows of the table at `path` as of `version`, with these columns: none that it is partitioned by. A
    column that a file lacks is null in its rows.

    Raises DeltaProtocolError for a table with features that deltalake does not read.
    """
    table = DeltaTable(path, version=version)
    table.to_pyarrow_dataset()  # refuses what a list of files does not tell, as rows that are marked as deleted
    names = pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
    schema = from_arrow_schema(columns, prefer_timestamp_ntz=False)
    if not names:
        return spark.createDataFrame([], schema)
    files = [_SPECIAL.sub(r"\\\1", f"{path}/{unquote(name)}") for name in names]
    return spark.read.schema(schema).parquet(*files)
