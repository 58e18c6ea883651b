"""The two runners agree: live views, view tables and a refold of the ledger's bytes are equal at one offset.

The most important test of the project. The log is random, with every kind of trouble; gateway and Spark are
killed and started again while it grows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from deltalake import DeltaTable

from connectors.live.live_view import LiveView
from connectors.local_stack import LocalStack, free_port
from schemas.fold.view_rows import REGISTRY_JOBS
from schemas.keys.sealing import load_keyring
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import (
    PROJECT_ROOT,
    AgentMcpSettings,
    DashboardSettings,
    GatewaySettings,
    KafkaSettings,
    Settings,
    settings_environment,
)
from schemas.streams.views import STREAM_ENTRIES, VIEW_TABLES
from schemas.tables.view_progress import read_progress
from tests.broker_processes import wait_until
from tests.faults.backbone_states import (
    differences,
    ledger_in_order,
    state_of_live_view,
    state_of_refold,
    state_of_tables,
)
from tests.random_log import RandomLog, append_raw_records

QUIET_WITHIN_S = 120.0
JOBS_SHOWN = 1000
PARTS = ("kafka", "gateway", "streams")


def own_settings(tmp_path: Path) -> Settings:
    """A backbone without an MQTT door."""
    return Settings(
        data_dir=tmp_path / "stack",
        kafka=KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"),
        gateway=GatewaySettings(port=free_port()),
        dashboard=DashboardSettings(port=0),
        agent_mcp=AgentMcpSettings(port=0),
    )


def end_offsets(settings: Settings) -> dict[int, int]:
    """The log's end per partition."""
    with topic_reader(settings.kafka) as consumer:
        ends = consumer.end_offsets(sorted(consumer.assignment()))
    return {where.partition: end for where, end in ends.items()}


def look_after(stack: LocalStack, seconds: float) -> None:
    """Supervise the stack for a while, as its supervisor does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stack.look_after()
        time.sleep(0.1)


def views_are_at(settings: Settings, ends: dict[int, int]) -> bool:
    """Whether the view tables hold all that lies below `ends`."""
    if not DeltaTable.is_deltatable(settings.table_path(STREAM_ENTRIES)):
        return False
    offsets = read_progress(DeltaTable(settings.table_path(STREAM_ENTRIES))).offsets
    return all(offsets.get(partition, 0) >= end for partition, end in ends.items())


def wait_until_quiet(stack: LocalStack, settings: Settings, steady: LiveView) -> None:
    """Wait until the reactor adds nothing more, and ledger, views and live view are at the log's end."""
    deadline = time.monotonic() + QUIET_WITHIN_S
    before: dict[int, int] = {}
    while time.monotonic() < deadline:
        look_after(stack, 3)
        ends = end_offsets(settings)
        up = all(part.state == "ready" for part in stack.parts.values())
        live = all(steady.next_offsets().get(p, 0) >= end for p, end in ends.items())
        if up and live and ends == before and views_are_at(settings, ends):
            return
        before = ends
    pytest.fail(f"not quiet within {QUIET_WITHIN_S} s: log at {before}, live view at {steady.next_offsets()}")


def job_rows_of_gateway(settings: Settings) -> dict[str, str]:
    """Status by job id, as the gateway answers."""
    token = settings.operator_token_file.read_text().strip()
    answer = httpx.get(
        f"{settings.gateway_url}/api/hub/jobs?limit={JOBS_SHOWN}",
        headers={"Authorization": f"Bearer {token}"},
        timeout=20,
    )
    return {row["job_id"]: row["status"] for row in answer.json()["jobs"]}


def wait_gateway_agrees(settings: Settings, statuses: dict[str, str]) -> None:
    """Wait until the gateway shows these jobs. Its view is its own, and comes to the log's end when it does."""

    def agrees() -> bool:
        found = job_rows_of_gateway(settings)
        return len(found) == min(JOBS_SHOWN, len(statuses)) and found.items() <= statuses.items()

    wait_until(agrees, 30, "the gateway shows the jobs of the tables")


def rebuild(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program that rebuilds or checks the views."""
    return subprocess.run(
        [sys.executable, "-m", "jobs.rebuild_views", *arguments],
        env=os.environ | settings_environment(settings),
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_the_check_finds_no_difference(settings: Settings) -> None:
    """What the program says that refolds the ledger and compares the views with it."""
    check = rebuild(settings, "--check", "--json")
    assert check.returncode == 0, check.stdout + check.stderr
    found = json.loads(check.stdout)
    assert (found["different"], found["newer"]) == (0, 0), found


def run_agreement(tmp_path: Path, records: int, rounds: int, seed: int) -> None:
    """The load, the kills, and what must hold afterwards."""
    settings = own_settings(tmp_path)
    with LocalStack(settings, parts=PARTS) as stack:
        keyring = load_keyring(settings)
        steady = LiveView(settings, keyring)
        steady.open()
        log = RandomLog(seed, keyring)
        for number in range(rounds):
            append_raw_records(settings, log.records(records // rounds))
            stack[("gateway", "streams")[number % 2]].kill()
            look_after(stack, 2)
        wait_until_quiet(stack, settings, steady)
        restarted = LiveView(settings, keyring)
        restarted.open()
        tables = state_of_tables(settings)
        streams = tables["entries"].keys() | {f"job/{job_id}" for job_id in tables["rows"][REGISTRY_JOBS]}
        live = [state_of_live_view(view, streams) for view in (steady, restarted)]
        rows = tables["rows"][REGISTRY_JOBS]
        wait_gateway_agrees(settings, {job_id: row["status"] for job_id, (_, row) in rows.items()})
        jobs = job_rows_of_gateway(settings)
        steady.close()
        restarted.close()
    ledger = ledger_in_order(settings)
    refolded = state_of_refold(ledger, keyring)
    assert ledger.num_rows >= records
    positions = {
        (row["partition"], row["offset"]) for row in ledger.select(["partition", "offset"]).to_pylist()
    }
    assert len(positions) == ledger.num_rows, "a record has two rows"
    assert differences(tables, refolded) == []
    assert differences(live[0], refolded) == []
    assert differences(live[1], refolded) == []
    rows = refolded["rows"][REGISTRY_JOBS]
    assert jobs.items() <= {job_id: row["status"] for job_id, (_, row) in rows.items()}.items()
    assert len(jobs) == min(JOBS_SHOWN, len(rows))
    assert_the_check_finds_no_difference(settings)
    for table in VIEW_TABLES:
        shutil.rmtree(settings.table_path(table))
    assert (done := rebuild(settings)).returncode == 0, done.stdout + done.stderr
    assert differences(state_of_tables(settings), refolded) == []
    assert_the_check_finds_no_difference(settings)


@pytest.mark.requirement("JE-09")
@pytest.mark.timeout(400)
def test_live_views_tables_and_a_refold_agree_after_trouble_and_kills(tmp_path: Path) -> None:
    run_agreement(tmp_path, records=1_200, rounds=2, seed=20261122)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_they_agree_after_twenty_thousand_records_and_ten_kills(tmp_path: Path) -> None:
    run_agreement(tmp_path, records=20_000, rounds=10, seed=20261123)
