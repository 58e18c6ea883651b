"""All tables in an object store: settled, shown, maintained, rebuilt and audited there, also while it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from connectors.tools.audit.verification import verify
from jobs.driver.programs import WriterClaim
from jobs.ledger.ledger_table import create_ledger
from jobs.refold import check_views
from schemas.keys.sealing import Keyring, load_keyring
from schemas.settings.settings import PROJECT_ROOT, Settings, SparkSettings, StorageSettings
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.tables.ledger import LEDGER
from tests.broker_processes import ProgramProcess, program_environment, wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess
from tests.jobs.conftest import DRAIN_LIMIT_S, ledger_rows
from tests.jobs.test_writer_claim import SILENT_S, beat_of
from tests.jobs.topic_load import append_all, event, registration
from tests.s3_server import ObjectStore

JOBS = [f"{number:08x}" for number in range(1, 9)]


@pytest.fixture
def settings(backbone_settings: Settings, s3: ObjectStore) -> Settings:
    """Settings with all tables and blobs in the object store."""
    there = StorageSettings(tables=f"s3://{s3.bucket}/log/tables")
    return backbone_settings.model_copy(update={"storage": there})


def statuses(settings: Settings) -> Counter[str]:
    """How many jobs of the view have each status."""
    rows = DeltaTable(settings.table_path(REGISTRY_JOBS)).to_pyarrow_table(columns=["status"])
    return Counter(rows["status"].to_pylist())


def assert_sound(settings: Settings) -> None:
    """Each record is settled once, the views are those of the ledger, and the audit finds nothing."""
    assert set(Counter((row["partition"], row["offset"]) for row in ledger_rows(settings)).values()) == {1}
    found = check_views(settings, DeltaTable(settings.table_path(LEDGER)), load_keyring(settings))
    assert (found.differences, found.newer) == ([], 0)
    assert verify(settings).findings == ()


@pytest.mark.requirement("DP-15")
@pytest.mark.timeout(600)
def test_a_log_is_settled_shown_maintained_rebuilt_and_audited_in_an_object_store(
    settings: Settings, keyring: Keyring, start_streams: Callable[..., ProgramProcess], tmp_path: Path
) -> None:
    streams = start_streams(settings, maintenance_interval_s=2)
    append_all(settings, [registration(job, keyring) for job in JOBS])
    append_all(settings, [event(job, 1, "started") for job in JOBS])
    streams.wait_ready(DRAIN_LIMIT_S)
    append_all(settings, [event(job, 2, "completed") for job in JOBS])
    wait_until(lambda: statuses(settings) == {"completed": len(JOBS)}, DRAIN_LIMIT_S, "all are in the view")
    wait_until(lambda: "maintain_tables: done" in streams.log(), DRAIN_LIMIT_S, "maintenance")
    assert streams.stop(timeout_s=60) == 0, streams.log()[-3000:]
    assert_sound(settings)

    gateway = GatewayProcess(settings, tmp_path)
    try:
        gateway.wait_ready()
        with gateway.client() as client:
            assert client.get(f"/api/hub/jobs/{JOBS[0]}").json()["status"] == "completed"
    finally:
        gateway.program.kill()

    shutil.rmtree(settings.state_path)
    command = [sys.executable, "-m", "jobs.rebuild_views"]
    done = subprocess.run(
        command, cwd=PROJECT_ROOT, env=program_environment(settings), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert_sound(settings)
    assert statuses(settings) == {"completed": len(JOBS)}


@pytest.mark.requirement("DP-16")
@pytest.mark.timeout(600)
def test_an_object_store_that_refuses_stalls_and_loses_answers_costs_no_record(
    settings: Settings, keyring: Keyring, s3: ObjectStore, start_streams: Callable[..., ProgramProcess]
) -> None:
    streams = start_streams(settings)
    append_all(settings, [registration(job, keyring) for job in JOBS])
    append_all(settings, [event(job, 1, "started") for job in JOBS])
    streams.wait_ready(DRAIN_LIMIT_S)
    s3.fail(refused=0.05, lost=0.05, conflict=0.2, delay_s=0.05)
    deadline, seq = time.monotonic() + 20, 1
    while time.monotonic() < deadline:
        seq += 1
        append_all(settings, [event(job, seq) for job in JOBS])
        time.sleep(0.5)
        if streams.process.poll() is not None:  # a supervisor starts it again
            streams = start_streams(settings)
    given = s3.fail()
    append_all(settings, [event(job, seq + 1, "completed") for job in JOBS])
    if streams.process.poll() is not None:
        streams = start_streams(settings)
    wait_until(lambda: statuses(settings) == {"completed": len(JOBS)}, DRAIN_LIMIT_S, f"all, after {given}")
    assert streams.stop(timeout_s=60) == 0, streams.log()[-3000:]
    assert set(given) == {"refused", "lost", "conflict"}
    assert_sound(settings)


@pytest.mark.requirement("DP-16")
def test_a_store_that_is_away_for_longer_than_the_term_ends_no_claim_and_holds_up_no_stop(
    settings: Settings, s3: ObjectStore
) -> None:
    settings = settings.model_copy(update={"spark": SparkSettings(silent_after_s=SILENT_S)})
    create_ledger(settings)
    with WriterClaim(settings) as claim:
        s3.fail(refused=1)
        time.sleep(2 * SILENT_S)
        s3.fail()
        number = beat_of(settings)["number"]
        wait_until(lambda: beat_of(settings)["number"] > number, DRAIN_LIMIT_S, "signs of life go on")
        claim.check()
        s3.fail(refused=1)
        began = time.monotonic()
    assert time.monotonic() - began < 15
    s3.fail()
