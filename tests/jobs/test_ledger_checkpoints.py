"""Checkpoints of the ledger's log that delta-rs writes beside the stream, and Spark's going on from them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from delta.tables import DeltaTable
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from jobs.ledger.ledger_table import EVERY_COMMITS, LedgerCheckpoints, create_ledger
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.ledger import LEDGER


def append(path: str, offset: int) -> None:
    known = {
        **dict.fromkeys(LEDGER_ARROW.names),
        "topic": "t",
        "partition": 0,
        "offset": offset,
        "stream_kind": "job",
        "stream_id": "00000001",
        "logged_at": datetime(2026, 1, 1, tzinfo=UTC),
        "verdict": "accepted",
        "late": False,
        "fold_version": 2,
    }
    write_deltalake(path, pa.Table.from_pylist([known], LEDGER_ARROW), mode="append")


def checkpoints_of(path: str) -> list[str]:
    return sorted(file.name for file in Path(path, "_delta_log").glob("*.checkpoint*.parquet"))


@pytest.mark.slow
def test_spark_goes_on_from_a_checkpoint_that_it_did_not_write(spark: SparkSession, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    path = settings.table_path(LEDGER)
    create_ledger(settings)
    checkpoints = LedgerCheckpoints(settings)
    assert checkpoints.write_if_due(), "the first at once"
    for offset in range(3):
        append(path, offset)
    for batch_id in range(EVERY_COMMITS):
        assert not checkpoints.write_if_due()
        checkpoints.committed(batch_id)
    assert checkpoints.write_if_due()
    assert len(checkpoints_of(path)) == 2
    append(path, 3)
    # Only the checkpoint knows what came before it now.
    for file in Path(path, "_delta_log").glob("*"):
        if file.suffix in (".json", ".crc") and file.stem < f"{3:020d}":
            file.unlink()
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()  # type: ignore[union-attr]
    found = [row["offset"] for row in spark.read.format("delta").load(path).select("offset").collect()]
    assert sorted(found) == [0, 1, 2, 3]
    properties = DeltaTable.forPath(spark, path).detail().collect()[0]["properties"]
    assert int(properties["delta.checkpointInterval"]) > EVERY_COMMITS, "Spark leaves it to us"


def test_a_checkpoint_that_cannot_be_written_is_told_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = LedgerCheckpoints(Settings(data_dir=tmp_path / "nothing"))
    assert not checkpoints.write_if_due()
    assert "ledger_checkpoints" in capsys.readouterr().err
    assert not checkpoints.write_if_due(), "not again at once"
