"""The sink of the settling job: one commit a micro-batch, and new columns in old tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs.once_sink import LastCommit, OnceSink, last_commit


def sink_of(path: Path, query_id: str) -> OnceSink:
    """A sink as a start makes it."""
    sink = OnceSink(str(path))
    sink.started(query_id)
    return sink


def test_a_table_from_before_a_new_column_goes_on_after_a_start(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "table"
    old, new = spark.createDataFrame([(1,)], "a int"), spark.createDataFrame([(2, "x")], "a int, b string")
    before = sink_of(path, "one")
    before(old, 0)
    after = sink_of(path, "one")
    after(old, 0)
    for batch in (1, 2):
        after(new, batch)
    rows = DeltaTable(path).to_pyarrow_table().sort_by("a").to_pylist()
    assert rows == [{"a": 1, "b": None}, {"a": 2, "b": "x"}, {"a": 2, "b": "x"}]


def test_an_empty_micro_batch_has_its_commit_too(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "table"
    frame = spark.createDataFrame([(1,)], "a int")
    sink_of(path, "one")(frame, 0)
    sink_of(path, "two")(frame.where("a > 1"), 0)
    assert last_commit(spark, str(path)) == LastCommit("two", 0)
    assert last_commit(spark, str(path), "one") == LastCommit("one", 0)
    assert last_commit(spark, str(path), "three") is None


def test_what_must_be_looked_at_before_a_write_can_stop_it(spark: SparkSession, tmp_path: Path) -> None:
    def refuse() -> None:
        raise RuntimeError("no")

    sink = OnceSink(str(tmp_path / "table"), before_batch=refuse)
    sink.started("one")
    with pytest.raises(RuntimeError, match="no"):
        sink(spark.createDataFrame([(1,)], "a int"), 0)
    assert not DeltaTable.is_deltatable(str(tmp_path / "table"))
