"""Both streaming queries in one driver, as the program that spark-submit runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from connectors.tools.audit.verification import verify
from jobs.driver.programs import WriterClaim
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.tables.ledger import LEDGER
from tests.broker_processes import PROJECT_ROOT, ProgramProcess, program_environment, wait_until
from tests.jobs.conftest import DRAIN_LIMIT_S
from tests.jobs.topic_load import append_all, event, registration
from trunkline_agent.errors import Refused

JOB = "0badcafe"


@pytest.fixture
def streams(
    backbone_settings: Settings, start_streams: Callable[..., ProgramProcess]
) -> Callable[..., ProgramProcess]:
    """Starts the program and waits until it is ready; it ends with the test."""

    def start(maintenance_interval_s: float = 0) -> ProgramProcess:
        program = start_streams(backbone_settings, maintenance_interval_s)
        program.wait_ready(DRAIN_LIMIT_S)
        return program

    return start


def status_of(settings: Settings) -> str | None:
    """The job's status in its table, or None."""
    rows = (
        DeltaTable(settings.table_path(REGISTRY_JOBS))
        .to_pyarrow_dataset()
        .to_table(columns=["job_id", "status"])
    )
    return next((row["status"] for row in rows.to_pylist() if row["job_id"] == JOB), None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_records_reach_ledger_and_views_across_a_stop_and_a_start_with_maintenance_between(
    streams: Callable[..., ProgramProcess], backbone_settings: Settings, keyring: Keyring
) -> None:
    program = streams(maintenance_interval_s=2)
    append_all(backbone_settings, [registration(JOB, keyring)])
    wait_until(lambda: status_of(backbone_settings) == "pending", DRAIN_LIMIT_S, "a row in the view")
    wait_until(lambda: "maintain_tables: done" in program.log(), DRAIN_LIMIT_S, "maintenance")
    with pytest.raises(Refused, match=str(program.process.pid)), WriterClaim(backbone_settings):
        pass
    command = [sys.executable, "-m", "jobs.rebuild_views"]
    environment = program_environment(backbone_settings)
    refused = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, capture_output=True, timeout=60)
    assert refused.returncode == 4, refused.stderr
    assert program.stop(timeout_s=60) == 0, program.log()[-3000:]
    append_all(backbone_settings, [event(JOB, 1, "started")])
    program = streams()
    wait_until(lambda: status_of(backbone_settings) == "running", DRAIN_LIMIT_S, "a newer row")
    assert program.stop(timeout_s=60) == 0, program.log()[-3000:]
    assert subprocess.run([*command, "--check"], cwd=PROJECT_ROOT, env=environment, timeout=60).returncode == 0
    report = verify(backbone_settings)
    # The topic begins with its topology and the MAC rules of each partition.
    rows = 2 + 1 + backbone_settings.kafka.partitions
    assert (report.findings, report.rows, report.rows_not_anchored) == ((), rows, 0), "the end is anchored"
    assert report.anchors >= 2


@pytest.mark.timeout(600)
def test_when_one_query_fails_all_end_with_the_reason(
    streams: Callable[..., ProgramProcess], backbone_settings: Settings, keyring: Keyring
) -> None:
    program = streams()
    path = Path(backbone_settings.table_path(REGISTRY_JOBS))
    shutil.rmtree(path)
    path.write_text("no table")
    append_all(backbone_settings, [registration(JOB, keyring)])
    wait_until(lambda: program.process.poll() is not None, DRAIN_LIMIT_S, "the end of the program")
    assert program.process.returncode == 1
    assert "run_streams: build_views:" in program.log()
    assert DeltaTable(backbone_settings.table_path(LEDGER)).to_pyarrow_table().num_rows >= 1
