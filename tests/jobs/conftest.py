"""Fixtures and helpers of the Spark tests: a topic drained into its ledger."""

from __future__ import annotations

import functools
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from connectors.programs.local_stack.part_plan import class_path
from jobs import settle_events
from schemas.settings.settings import PROJECT_ROOT, Settings, ViewSettings
from schemas.tables.ledger import LEDGER
from tests.broker_processes import ProgramProcess

Rows = list[dict[str, Any]]
DRAIN_LIMIT_S = 120


def ledger_rows(settings: Settings) -> Rows:
    """All rows of the ledger, in the order of the log."""
    table = DeltaTable(settings.table_path(LEDGER)).to_pyarrow_table()
    return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"]))


def settle_all(spark: SparkSession, settings: Settings) -> Rows:
    """Settle all that is in the topic by the real job, and read the ledger."""
    query = settle_events.start(spark, settings, available_now=True)
    assert query.awaitTermination(DRAIN_LIMIT_S), "the query did not end in time"
    return ledger_rows(settings)


@pytest.fixture
def drain(spark: SparkSession, backbone_settings: Settings) -> Callable[[], Rows]:
    """`settle_all` for this test's topic."""
    return functools.partial(settle_all, spark, backbone_settings)


@pytest.fixture
def start_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProgramProcess]]:
    """Starts the streaming jobs with some settings, as spark-submit runs them. They end with the test."""
    spark = ["--properties-file", str(PROJECT_ROOT / "conf" / "spark-defaults.conf"), "--master", "local[2]"]
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    started: list[ProgramProcess] = []

    def start(settings: Settings, maintenance_interval_s: float = 0) -> ProgramProcess:
        name = f"streams-{len(started)}"
        more = ["--conf", f"spark.local.dir={tmp_path / name}", "--driver-class-path", class_path()]
        monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", shlex.join([*spark, *more, "pyspark-shell"]))
        views = ViewSettings(interval_ms=200, maintenance_interval_s=maintenance_interval_s)
        settings = settings.model_copy(update={"views": views})
        started.append(ProgramProcess("jobs.run_streams", settings, tmp_path, name))
        return started[-1]

    yield start
    for program in started:
        program.process.send_signal(signal.SIGCONT)
        program.kill()
