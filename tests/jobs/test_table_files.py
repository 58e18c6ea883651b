"""Tables at a version, read by Spark without its Delta extension."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from jobs.table_files import read_table

COLUMNS = pa.schema([("name", pa.string()), ("at", pa.timestamp("us", "UTC")), ("value", pa.binary())])


def rows(*names: str) -> pa.Table:
    """A row for each name, all on shelf 3."""
    columns = {"name": list(names), "at": [0] * len(names), "value": [b"x"] * len(names)}
    return pa.table(columns, COLUMNS).append_column("shelf", pa.array([3] * len(names), pa.int32()))


def names_in(spark: SparkSession, path: str, version: int) -> list[str]:
    """What is read of the table, sorted."""
    found = read_table(spark, path, version, COLUMNS).toArrow()
    assert found.schema.field("at").type == COLUMNS.field("at").type
    return sorted(found["name"].to_pylist())


# A data directory may be called as it likes; Spark takes some of these for patterns.
@pytest.mark.parametrize("name", ["plain", "a b", "c{d,e}", "f*?", "ü"])
def test_a_version_is_read_as_it_was_whatever_the_folders_name(spark: SparkSession, tmp_path: Path, name: str):
    path = str(tmp_path / name)
    write_deltalake(path, rows("one", "two"), partition_by=["shelf"])
    write_deltalake(path, rows("three"), mode="append")
    write_deltalake(path, rows("four"), mode="overwrite")
    assert names_in(spark, path, 0) == ["one", "two"]
    assert names_in(spark, path, 1) == ["one", "three", "two"]
    assert names_in(spark, path, 2) == ["four"]


def test_a_table_without_files_has_no_rows(spark: SparkSession, tmp_path: Path):
    DeltaTable.create(str(tmp_path), COLUMNS)
    assert names_in(spark, str(tmp_path), 0) == []


def test_a_column_that_is_newer_than_a_file_is_null_in_its_rows(spark: SparkSession, tmp_path: Path):
    write_deltalake(tmp_path, rows("old").drop_columns("value"))
    write_deltalake(tmp_path, rows("new"), mode="append", schema_mode="merge")
    found = read_table(spark, str(tmp_path), 1, COLUMNS).toArrow().sort_by("name").to_pylist()
    assert [row["value"] for row in found] == [b"x", None]


def test_rows_that_are_marked_as_deleted_are_not_read_as_if_they_were_there(
    delta_spark: SparkSession, tmp_path: Path
):
    """Nothing of ours marks rows so; who lets another program do it is told, and nothing is settled twice."""
    path = str(tmp_path)
    write_deltalake(path, rows("one", "two"))
    DeltaTable(path).alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    with pytest.raises(DeltaError, match=r"(?i)deletion"):
        names_in(delta_spark, path, 1)
