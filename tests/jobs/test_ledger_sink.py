"""The sink of the settling job: one commit a micro-batch, of files that are in the table once."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError
from kafka import TopicPartition
from pyspark.sql import DataFrame, Row, SparkSession

from jobs.ledger.ledger_table import SKIPPING_COLUMNS, create_ledger, prepare_ledger, write_file
from jobs.maintain_tables import tidy_ledger
from jobs.settling.fold_run import OrderError
from jobs.settling.ledger_sink import LedgerSink, SecondWriter
from jobs.settling.partition_task import LEDGER_FILE
from schemas.log_access.event_topic import admin_client
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.ledger import LEDGER
from tests.raw_records import begin_transaction, read_to_end
from trunkline_agent.errors import TrunklineError


def ledger_rows(
    *offsets: int, moment: datetime = datetime(2026, 1, 1, tzinfo=UTC), partition: int = 3
) -> pa.RecordBatch:
    """Rows of a ledger."""
    fixed = {
        "topic": "t",
        "partition": partition,
        "stream_kind": "job",
        "stream_id": "00000001",
        "logged_at": moment,
    }
    rest = {"verdict": "accepted", "late": False, "fold_version": 2, "entries": [("job", b"x"), ("end", None)]}
    return pa.RecordBatch.from_pylist([{**fixed, **rest, "offset": at} for at in offsets], LEDGER_ARROW)


def files_of(path: str, *batches: pa.RecordBatch) -> list[dict[str, object]]:
    """Return the file of a task that settled these rows."""
    return [row for written in write_file(path, batches) for row in written.to_pylist()]


def sink_of(settings: Settings, query_id: str) -> LedgerSink:
    """A sink as a start makes it."""
    sink = LedgerSink(settings)
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


def marks_of(path: str) -> list[tuple[str, int]]:
    """The query and the number of each micro-batch in the table, oldest first."""
    history = DeltaTable(path).history()
    texts = [commit["userMetadata"] for commit in reversed(history) if "userMetadata" in commit]
    return [(mark["query"], mark["batch"]) for mark in map(json.loads, texts)]


def test_a_micro_batch_that_begins_before_the_ledgers_end_is_refused(
    spark: SparkSession, settings: Settings, path: str
) -> None:
    sink_of(settings, "one")(frame_of(spark, files_of(path, ledger_rows(0, 1))), 0)
    later = sink_of(settings, "two")
    assert later.ends == {3: 2}
    for offsets in ((0, 1), (1, 2)):
        with pytest.raises(TrunklineError, match=f"offsets {offsets[0]} to .* of partition 3.*ends before"):
            later(frame_of(spark, files_of(path, ledger_rows(*offsets))), 0)
    later(frame_of(spark, files_of(path, ledger_rows(2))), 0)
    assert offsets_in(path) == [0, 1, 2]
    assert marks_of(path) == [("one", 0), ("two", 0)]


@pytest.mark.requirement("ST-03")
def test_a_partition_in_two_files_of_a_micro_batch_is_refused(settings: Settings, path: str) -> None:
    files = [Row(**file) for part in ((0, 1), (2,)) for file in files_of(path, ledger_rows(*part))]
    with pytest.raises(TrunklineError, match="in several files"):
        sink_of(settings, "one").commit(files, 0)
    assert offsets_in(path) == []


@pytest.mark.requirement("ST-03")
def test_a_gap_with_a_record_of_kafka_is_refused_and_one_without_is_not(backbone_settings: Settings) -> None:
    settings = backbone_settings
    prepare_ledger(settings)
    for _ in range(2):
        begin_transaction(settings.kafka).commit_transaction(20)
    first, last = sorted(one.offset for one in read_to_end(settings.kafka) if one.key == b"job/0a1b2c3d")
    path, sink = settings.table_path(LEDGER), sink_of(settings, "one")

    def commit(*offsets: int) -> None:
        rows = ledger_rows(*offsets, partition=0)
        sink.commit([Row(**file) for file in files_of(path, rows)], 0)

    with pytest.raises(OrderError, match="Kafka's next record is"):
        commit(last)
    commit(*range(first + 1))
    commit(last)
    assert offsets_in(path) == [*range(first + 1), last]
    with admin_client(settings.kafka) as admin:
        admin.delete_records({TopicPartition(settings.kafka.topic, 0): -1})
    with pytest.raises(OrderError, match="Kafka's next record is None"):
        commit(last + 2)


def test_a_settling_job_that_another_one_has_replaced_commits_nothing_more(
    spark: SparkSession, settings: Settings, path: str
) -> None:
    old = sink_of(settings, "old")
    old(frame_of(spark, files_of(path, ledger_rows(0))), 0)
    new = sink_of(settings, "new")
    # Both have settled the same record, and the new one commits first.
    theirs = [Row(**file) for file in files_of(path, ledger_rows(1))]
    new(frame_of(spark, files_of(path, ledger_rows(1))), 0)
    with pytest.raises(SecondWriter, match="another settling job"):
        old.commit(theirs, 1)
    with pytest.raises(SecondWriter, match="only one may run"):
        old(frame_of(spark, files_of(path, ledger_rows(1))), 1)
    new(frame_of(spark, files_of(path, ledger_rows(2))), 1)
    assert offsets_in(path) == [0, 1, 2]
    assert marks_of(path) == [("old", 0), ("new", 0), ("new", 1)]


@pytest.mark.requirement("ST-03")
def test_a_commit_that_seems_to_have_failed_and_is_there_counts_once(
    settings: Settings, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, commit = sink_of(settings, "one"), LedgerSink._commit_at_end

    def lose_the_answer(*arguments: Any) -> None:
        commit(*arguments)
        sink._seen -= 1
        raise CommitFailedError("the version exists")

    with monkeypatch.context() as patch:
        patch.setattr(LedgerSink, "_commit_at_end", lose_the_answer)
        sink.commit([Row(**file) for file in files_of(path, ledger_rows(0, 1))], 0)
    sink.commit([Row(**file) for file in files_of(path, ledger_rows(2))], 1)
    assert offsets_in(path) == [0, 1, 2]
    assert marks_of(path) == [("one", 0), ("one", 1)]


def test_an_empty_micro_batch_makes_no_commit(spark: SparkSession, settings: Settings, path: str) -> None:
    version, done = DeltaTable(path).version(), []
    sink = LedgerSink(settings, done.append)
    sink.started("one")
    sink(frame_of(spark, []), 4)
    assert (DeltaTable(path).version(), done) == (version, [4])


def test_spark_and_delta_rs_read_the_same_rows_and_skip_files_by_the_same_statistics(
    spark: SparkSession, settings: Settings, path: str
) -> None:
    sink = sink_of(settings, "one")
    moment = datetime(2026, 3, 4, 5, 6, 7, 89_000, tzinfo=UTC)
    sink(frame_of(spark, files_of(path, ledger_rows(0, 1), ledger_rows(2, 3, moment=moment))), 0)
    sink(frame_of(spark, files_of(path, ledger_rows(4))), 1)
    ledger = spark.read.format("delta").load(path)
    assert ledger.toArrow().sort_by("offset").to_pylist() == (
        DeltaTable(path).to_pyarrow_table().sort_by("offset").to_pylist()
    )
    assert ledger.where("logged_at >= '2026-03-04T05:06:07.089Z'").count() == 2
    assert ledger.where("logged_at > '2026-03-04T05:06:07.089Z'").count() == 0
    (first, second) = pa.table(DeltaTable(path).get_add_actions(flatten=True)).sort_by("min.offset").to_pylist()
    assert (first["num_records"], first["min.offset"], first["max.offset"]) == (4, 0, 3)
    assert (first["min.logged_at"], first["max.logged_at"]) == (datetime(2026, 1, 1, tzinfo=UTC), moment)
    assert (first["min.partition"], first["max.verdict"], first["null_count.offset"]) == (3, "accepted", 0)
    assert second["min.offset"] == 4
    assert all(not LEDGER_ARROW.field(name).nullable for name in SKIPPING_COLUMNS)


@pytest.mark.slow
def test_micro_batches_and_maintenance_commit_side_by_side(
    spark: SparkSession, settings: Settings, path: str
) -> None:
    sink, done = sink_of(settings, "one"), threading.Event()
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
    assert marks_of(path) == [("one", number) for number in range(60)]


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
    sink_of(settings, "one")(frame_of(spark, files_of(path, ledger_rows(0))), 0)
    assert offsets_in(path) == [0]
