"""The demo, end to end on real parts: its figures, its exit codes, and that nothing is left running."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from connectors.cli import demo_command
from connectors.cli.main import main
from connectors.demo import performance as demo_performance
from connectors.demo import stage_stack
from connectors.demo.outcome import compare
from connectors.demo.performance import Performance
from connectors.demo.told_verdicts import told_verdicts
from connectors.ledger_reader import LedgerFilter, LedgerReader
from connectors.local_stack import child_process
from connectors.receipt import Receipt
from schemas.settings import PROJECT_ROOT, Settings
from tests.connectors.demo.folded_plan import FoldedPlan, plan_of

DEMO_S = 330.0
STOP_S = 60.0


def receipts_of(rows: list[dict[str, Any]]) -> dict[str, list[Receipt]]:
    """The receipts that a bridge would send for these rows."""
    found: dict[str, list[Receipt]] = {}
    for row in rows:
        if row["type"] == "job.event" and row["stream_kind"] == "job":
            receipt = Receipt(row["ce_id"], row["seq"], row["verdict"], row["reason"])
            found.setdefault(row["ce_id"], []).append(receipt)
    return found


@contextmanager
def demo_process(data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """`demo --json` as a process of its own, in its own data directory."""
    process = subprocess.Popen(
        [sys.executable, "-m", "connectors.cli", "demo", "--json", "--data-dir", str(data_dir)],
        cwd=PROJECT_ROOT,
        env=os.environ | {"TRUNKLINE_CONF": os.devnull},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=STOP_S)
        child_process.kill_marked(child_process.mark_of(data_dir, ""))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> FoldedPlan:
    """The command with the stack left out: what the fold makes of the plan is the ledger."""
    folded = FoldedPlan(plan_of(20))

    def perform(*_: object) -> Performance:
        rows = folded.row_dicts()[:-1] if lacking else folded.row_dicts()
        outcome = compare(rows, folded.deliveries, folded.plan.states)
        told = told_verdicts(receipts_of(rows), rows)
        return Performance(
            folded.plan, folded.deliveries, rows, outcome, told, ["demo-session"], ["echo is done"]
        )

    lacking: list[bool] = []
    monkeypatch.setattr(demo_performance, "perform", perform)
    monkeypatch.setattr(stage_stack, "own_stack", lambda *_: nullcontext(lambda: None))
    folded.lose_a_row = lambda: lacking.append(True)  # type: ignore[attr-defined]
    return folded


@pytest.mark.timeout(DEMO_S + STOP_S + 30)
def test_the_demo_ends_with_the_ledger_as_planned(tmp_path: Path) -> None:
    data_dir = tmp_path / "a demo's data"
    with demo_process(data_dir) as process:
        out, err = process.communicate(timeout=DEMO_S)
        assert process.returncode == 0, err
        figures = json.loads(out.splitlines()[-1])
        assert len(out.splitlines()) == 1
        assert figures["sent"] == (
            figures["accepted"] + figures["duplicate"] + sum(figures["rejected"].values())
        )
        assert sum(figures["jobs"].values()) == 20
        expected = plan_of(20)
        # MQTT may deliver a message twice.
        assert figures["rejected"].keys() == expected.rejected.keys()
        assert all(figures["rejected"][reason] >= times for reason, times in expected.rejected.items())
        assert figures["receipts"]["rejected"] > 0 and figures["receipts"]["accepted"] > 0
        assert figures["duplicate"] >= expected.verdicts["duplicate"]
        assert 0 < figures["seconds"] < DEMO_S
        events = LedgerReader(Settings(data_dir=data_dir)).rows(LedgerFilter(type="job.event"), ["verdict"])
        assert events.rows.num_rows == figures["sent"]
        assert all(f"[{step}/6]" in err for step in range(1, 7))
        assert child_process.marked_processes(child_process.mark_of(data_dir, "")) == []


@pytest.mark.timeout(STOP_S * 2 + 30)
def test_ctrl_c_stops_what_the_demo_started(tmp_path: Path) -> None:
    mark = child_process.mark_of(tmp_path, "")
    with demo_process(tmp_path) as process:
        deadline = time.monotonic() + STOP_S
        while len(child_process.marked_processes(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=STOP_S)
        assert process.returncode == 130
        assert out == ""
        assert "Traceback" not in err
        assert "Stopped after" in err
        assert child_process.marked_processes(mark) == []


def test_the_report_shows_jobs_dead_letters_a_timeline_and_where_the_tables_lie(
    played: FoldedPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--data-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for job_id in played.plan.states:
        assert job_id in shown
    for reason in played.plan.rejected:
        assert reason in shown
    assert "One job's timeline" in shown
    assert str(tmp_path / "tables" / "ledger") in shown
    assert f"{played.plan.sent} job events reached Kafka" in shown
    assert f"Receipts told the senders: {played.plan.verdicts['accepted']} accepted" in shown
    assert "Session demo-session picked its job at the gateway" in shown
    assert "\x1b" not in shown


def test_a_ledger_that_differs_makes_the_demo_fail_and_is_told(
    played: FoldedPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played.lose_a_row()  # type: ignore[attr-defined]
    assert main(["demo", "--json", "--data-dir", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "differs: refused/mqtt" in told.err
    assert json.loads(told.out.splitlines()[-1])["sent"] == played.plan.sent - 1


def test_too_few_jobs_are_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--jobs", "3"]) == 2
    assert "--jobs" in capsys.readouterr().err


def test_the_demo_never_takes_the_ports_of_a_configured_stack(tmp_path: Path) -> None:
    configured = Settings()
    own = stage_stack.own_settings(configured, tmp_path)
    assert own.kafka.bootstrap_servers != configured.kafka.bootstrap_servers
    assert own.mqtt.port != configured.mqtt.port
    assert own.gateway.port != configured.gateway.port
    assert own.data_path == tmp_path
    assert own.tables_root == str(tmp_path / "tables")


def test_its_own_help_names_every_option() -> None:
    parser = argparse.ArgumentParser()
    demo_command.configure(parser)
    for option in ("--json", "--keep", "--jobs", "--data-dir"):
        assert option in parser.format_help()
