"""Tables at a version, read by Spark without its Delta extension."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from jobs.views.table_files import read_table
from schemas.errors import TrunklineError

COLUMNS = pa.schema([("name", pa.string()), ("at", pa.timestamp("us", "UTC")), ("value", pa.binary())])


def rows(*names: str) -> pa.Table:
    """A row for each name, all on a shelf whose folder has a name that must be escaped."""
    columns = {"name": list(names), "at": [0] * len(names), "value": [b"x"] * len(names)}
    return pa.table(columns, COLUMNS).append_column("shelf", pa.array(["a b/%c"] * len(names)))


def names_in(spark: SparkSession, path: str, version: int) -> list[str]:
    """Return the names that this version of the table has, sorted."""
    found = read_table(spark, path, version, COLUMNS).toArrow()
    assert found.schema.field("at").type == COLUMNS.field("at").type
    return sorted(found["name"].to_pylist())


# Spark takes some of these for patterns. Of others, as [ and %, deltalake itself makes nothing.
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


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("delta.enableDeletionVectors", "true", "(?i)deletion"), ("delta.columnMapping.mode", "name", "mapped")],
)
def test_what_a_list_of_files_does_not_tell_is_refused(
    spark: SparkSession, tmp_path: Path, name: str, value: str, why: str
):
    """Rows marked as deleted, columns under other names: nothing of ours makes them, other programs may."""
    path = str(tmp_path)
    write_deltalake(path, rows("one", "two"))
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('{name}' = '{value}')")
    with pytest.raises(TrunklineError, match=why):
        names_in(spark, path, 1)


def test_files_that_are_gone_are_told(spark: SparkSession, tmp_path: Path):
    write_deltalake(tmp_path, rows("one"))
    write_deltalake(tmp_path, rows("two"), mode="append")
    next(tmp_path.rglob("*.parquet")).unlink()
    with pytest.raises((TrunklineError, AnalysisException), match=r"gone|PATH_NOT_FOUND"):
        names_in(spark, str(tmp_path), 1)
