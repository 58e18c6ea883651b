"""kill -9 of the settling job before and after Delta's commit: each record is in the ledger once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from connectors.tools.audit.verification import verify
from jobs import settle_events
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings, settings_environment
from schemas.tables.ledger import LEDGER
from tests.jobs.conftest import DRAIN_LIMIT_S, ledger_rows
from tests.jobs.topic_load import append_all, event, registration
from tests.programs import run_program

JOBS = [f"{number:08x}" for number in range(20)]
EVENTS = 12


def crash(settings: Settings, point: str, batch: int, work_dir: Path, limit_s: float = DRAIN_LIMIT_S) -> None:
    """Run the job until it kills itself at the named point."""
    done = run_program(
        [sys.executable, "-m", "tests.jobs.crashing_settle", point, str(batch), str(work_dir)],
        timeout_s=limit_s,
        env=os.environ | settings_environment(settings),
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def committed_batches(settings: Settings) -> int:
    """How many micro-batches are in the ledger."""
    history = DeltaTable(settings.table_path(LEDGER)).history()
    return sum(commit.get("userMetadata") is not None for commit in history)


@pytest.mark.parametrize(("point", "batch", "committed"), [("before", 1, 1), ("after", 1, 2)])
def test_a_kill_before_or_after_the_commit_neither_loses_nor_doubles_a_record(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring, tmp_path: Path, point, batch, committed
) -> None:
    limits = backbone_settings.spark.model_copy(update={"max_offsets_per_trigger": 80})
    settings = backbone_settings.model_copy(update={"spark": limits})
    append_all(settings, (registration(job, keyring) for job in JOBS))
    kinds = {1: "started", EVENTS: "completed"}
    count = append_all(
        settings, (event(job, seq, kinds.get(seq, "progress")) for seq in range(1, EVENTS + 1) for job in JOBS)
    )
    crash(settings, point, batch, tmp_path / "crashed")
    assert committed_batches(settings) == committed
    query = settle_events.start(spark, settings, available_now=True)
    assert query.awaitTermination(DRAIN_LIMIT_S)
    rows = ledger_rows(settings)
    assert len(rows) == len({(row["partition"], row["offset"]) for row in rows}) == count + len(JOBS) + 5
    # Every event is accepted once: the state of the batch that was settled twice is the right one.
    assert {row["verdict"] for row in rows} == {"accepted"}
    assert {row["late"] for row in rows} == {False}
    report = verify(settings, without_anchors=True)
    assert (report.findings, report.rows) == ((), len(rows))
    assert report.entries == committed_batches(settings), "one entry for each, also of the repeated one"
