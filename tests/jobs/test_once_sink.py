"""The sink of the settling job: one commit a micro-batch, of files that are in the table once."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from pyspark.sql import DataFrame, SparkSession

from jobs.ledger.ledger_files import SKIPPING_COLUMNS, write_file
from jobs.ledger.ledger_table import create_ledger, prepare_ledger
from jobs.maintain_tables import tidy_ledger
from jobs.settling.once_sink import LastCommit, OnceSink, last_commit
from jobs.spark.record_packing import to_cell
from schemas.settings.settings import Settings
from schemas.tables.ledger import LEDGER
from schemas.tables.ledger_arrow import LEDGER_ARROW
from schemas.tables.spark_types import LEDGER_FILE


def ledger_rows(*offsets: int, moment: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> pa.RecordBatch:
    """Rows of a ledger."""
    fixed = {"topic": "t", "partition": 3, "stream_kind": "job", "stream_id": "00000001", "logged_at": moment}
    rest = {"verdict": "accepted", "late": False, "fold_version": 2, "entries": [("job", b"x"), ("end", None)]}
    return pa.RecordBatch.from_pylist([{**fixed, **rest, "offset": at} for at in offsets], LEDGER_ARROW)


def files_of(path: str, *batches: pa.RecordBatch) -> list[dict[str, object]]:
    """Return the files of a task that settled these rows."""
    cells = pa.RecordBatch.from_pydict({"rows": pa.array([to_cell(batch) for batch in batches], pa.binary())})
    return [row for written in write_file(path, [cells]) for row in written.to_pylist()]


def sink_of(path: str, query_id: str) -> OnceSink:
    """A sink as a start makes it."""
    sink = OnceSink(path)
    sink.started(query_id)
    return sink


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with a ledger of their own, below a folder with a space."""
    made = Settings(data_dir=tmp_path / "a folder")
    prepare_ledger(made)
    return made


@pytest.fixture
def path(settings: Settings) -> str:
    """The ledger's."""
    return settings.table_path(LEDGER)


def frame_of(spark: SparkSession, files: list[dict[str, object]]) -> DataFrame:
    return spark.createDataFrame(files, LEDGER_FILE)


def offsets_in(path: str) -> list[int]:
    return sorted(DeltaTable(path).to_pyarrow_table()["offset"].to_pylist())


def test_a_micro_batch_that_comes_again_after_a_start_is_not_in_the_table_twice(
    spark: SparkSession, path: str
) -> None:
    sink_of(path, "one")(frame_of(spark, files_of(path, ledger_rows(0, 1))), 0)
    again = sink_of(path, "one")
    again(frame_of(spark, files_of(path, ledger_rows(0, 1))), 0)
    again(frame_of(spark, files_of(path, ledger_rows(2))), 1)
    assert offsets_in(path) == [0, 1, 2]
    another = sink_of(path, "two")
    another(frame_of(spark, files_of(path, ledger_rows(3))), 0)
    assert offsets_in(path) == [0, 1, 2, 3], "the batches of another query are counted apart"


def test_an_empty_micro_batch_has_its_commit_too(spark: SparkSession, path: str) -> None:
    sink_of(path, "one")(frame_of(spark, files_of(path, ledger_rows(0))), 0)
    assert files_of(path) == []
    sink_of(path, "two")(frame_of(spark, []), 0)
    assert last_commit(path) == LastCommit("two", 0)
    assert last_commit(path, "one") == LastCommit("one", 0)
    assert last_commit(path, "three") is None


def test_what_must_be_looked_at_before_a_write_can_stop_it(spark: SparkSession, path: str) -> None:
    def refuse() -> None:
        raise RuntimeError("no")

    sink = OnceSink(path, before_batch=refuse)
    sink.started("one")
    with pytest.raises(RuntimeError, match="no"):
        sink(frame_of(spark, files_of(path, ledger_rows(0))), 0)
    assert offsets_in(path) == []


def test_spark_and_delta_rs_read_the_same_rows_and_skip_files_by_the_same_statistics(
    spark: SparkSession, path: str
) -> None:
    sink = sink_of(path, "one")
    moment = datetime(2026, 3, 4, 5, 6, 7, 89_000, tzinfo=UTC)
    sink(frame_of(spark, files_of(path, ledger_rows(0, 5), ledger_rows(6, 7, moment=moment))), 0)
    sink(frame_of(spark, files_of(path, ledger_rows(8))), 1)
    ledger = spark.read.format("delta").load(path)
    assert ledger.toArrow().sort_by("offset").to_pylist() == (
        DeltaTable(path).to_pyarrow_table().sort_by("offset").to_pylist()
    )
    assert ledger.where("logged_at >= '2026-03-04T05:06:07.089Z'").count() == 2
    assert ledger.where("logged_at > '2026-03-04T05:06:07.089Z'").count() == 0
    (first, second) = pa.table(DeltaTable(path).get_add_actions(flatten=True)).sort_by("min.offset").to_pylist()
    assert (first["num_records"], first["min.offset"], first["max.offset"]) == (4, 0, 7)
    assert (first["min.logged_at"], first["max.logged_at"]) == (datetime(2026, 1, 1, tzinfo=UTC), moment)
    assert (first["min.partition"], first["max.verdict"], first["null_count.offset"]) == (3, "accepted", 0)
    assert second["min.offset"] == 8
    assert all(not LEDGER_ARROW.field(name).nullable for name in SKIPPING_COLUMNS)


@pytest.mark.slow
def test_micro_batches_and_maintenance_commit_side_by_side(
    spark: SparkSession, settings: Settings, path: str
) -> None:
    sink, done = sink_of(path, "one"), threading.Event()
    rounds: list[int] = []

    def tidy() -> None:
        while not done.is_set():
            tidy_ledger(settings)
            rounds.append(1)

    tidying = threading.Thread(target=tidy)
    tidying.start()
    try:
        for batch in range(60):
            sink(frame_of(spark, files_of(path, ledger_rows(batch))), batch)
    finally:
        done.set()
        tidying.join()
    assert offsets_in(path) == list(range(60))
    operations = [commit["operation"] for commit in DeltaTable(path).history()]
    assert "OPTIMIZE" in operations[:-5] and rounds
    assert last_commit(path) == LastCommit("one", 59)


def test_a_ledger_without_comments_a_column_and_a_property_goes_on_after_a_start(
    spark: SparkSession, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path)
    path = settings.table_path(LEDGER)
    columns = Schema.from_arrow(LEDGER_ARROW).fields[:-1]
    DeltaTable.create(path, Schema(columns), configuration={"delta.checkpointInterval": "100"})
    create_ledger(settings)
    assert len(DeltaTable(path).schema().fields) == len(columns), "only a start changes what is there"
    prepare_ledger(settings)
    version = DeltaTable(path).version()
    assert [field.name for field in DeltaTable(path).schema().fields] == LEDGER_ARROW.names
    assert DeltaTable(path).metadata().configuration["delta.checkpointInterval"] == "10000"
    prepare_ledger(settings)
    assert DeltaTable(path).version() == version, "the next start finds nothing to do"
    sink_of(path, "one")(frame_of(spark, files_of(path, ledger_rows(0))), 0)
    assert offsets_in(path) == [0]
