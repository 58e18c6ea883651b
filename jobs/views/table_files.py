"""Reads a Delta table at one version with Spark, but without Spark's Delta extension.

The library deltalake reads the table's log, and Spark reads the data files. With the extension, each
micro-batch takes a tenth longer, and only a recovery reads tables (decision 0011).
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaProtocolError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from schemas.errors import TrunklineError
from schemas.tables.delta_files import dataset_of

# Spark interprets a path as a pattern.
_SPECIAL: Final = re.compile(r"([{}*?])")


def read_table(spark: SparkSession, path: str, version: int, columns: pa.Schema) -> DataFrame:
    """Return the rows of the Delta table at `path`, as of `version`, as a Spark frame.

    Args:
        spark: The session.
        path: The table's path or URI.
        version: The version of the table.
        columns: The columns to return, which must not be partition columns. If a file lacks a column, it is
            null.

    Raises:
        TrunklineError: The table uses features of Delta that its files alone do not show, or files were
            deleted.
    """
    table = DeltaTable(path, version=version)
    try:
        dataset_of(table)
    except DeltaProtocolError as error:
        raise TrunklineError(f"the table at {path} cannot be read: {error}") from error
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        raise TrunklineError(f"the table at {path} has mapped columns, which no program of ours makes")
    names = pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
    schema = from_arrow_schema(columns, prefer_timestamp_ntz=False)
    if not names:
        return spark.createDataFrame([], schema)
    files = [_SPECIAL.sub(r"\\\1", f"{path}/{unquote(name)}") for name in names]
    frame = spark.read.schema(schema).parquet(*files)
    if (found := len(frame.inputFiles())) != len(files):  # Spark skips missing files
        raise TrunklineError(f"{len(files) - found} files of version {version} of the table at {path} are gone")
    return frame
