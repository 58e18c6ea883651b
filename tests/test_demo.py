"""The demo, end to end on real parts: its figures, its exit codes, and that nothing is left running."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow.compute as pc
import pyarrow.parquet as parquet
import pytest
from deltalake import DeltaTable

from connectors.cli.main import main
from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.programs.local_stack import child_process, free_port
from connectors.programs.local_stack.stack import plans_of
from connectors.tools.demo import performance as demo_performance
from connectors.tools.demo import stage_stack
from connectors.tools.demo.outcome import check_receipts, compare
from connectors.tools.demo.performance import Performance
from schemas.settings.settings import KafkaSettings, Settings
from tests.connectors.tools.demo.folded_plan import FoldedPlan, plan_of
from tests.notebook_run import run_here, run_in_kernel
from tests.odd_places import ODD_NAME
from tests.programs import start_program
from trunkline_agent.wire.receipt import Receipt
from trunkline_agent.wire.verdicts import REASONS

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
    process = start_program(
        [sys.executable, "-m", "connectors.cli", "demo", "--json", "--data-dir", str(data_dir)],
        env=os.environ | {"TRUNKLINE_CONF": os.devnull},
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
        receipts = check_receipts(receipts_of(rows), rows)
        return Performance(folded.plan, folded.deliveries, rows, outcome, receipts, ["echo is done"])

    lacking: list[bool] = []
    monkeypatch.setattr(demo_performance, "perform", perform)
    monkeypatch.setattr(stage_stack, "own_stack", lambda *_: nullcontext(lambda: None))
    folded.lose_a_row = lambda: lacking.append(True)  # type: ignore[attr-defined]
    return folded


class DemoRun(NamedTuple):
    """A demo that has ended: its data directory, exit code, and what it printed."""

    data_dir: Path
    code: int
    out: str
    err: str

    @property
    def figures(self) -> dict[str, Any]:
        """Its last line of JSON."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """One run of the demo for all tests here, in a folder whose name is as odd as all programs take it (OP-51).

    Nothing of it runs any more; its tables stay.
    """
    data_dir = tmp_path_factory.mktemp("demo") / ODD_NAME
    with demo_process(data_dir) as process:
        out, err = process.communicate(timeout=DEMO_S)
        assert child_process.marked_processes(child_process.mark_of(data_dir, "")) == []
    return DemoRun(data_dir, process.returncode, out, err)


@pytest.mark.requirement("OP-51")
@pytest.mark.timeout(DEMO_S + STOP_S + 30)
def test_the_demo_ends_with_the_ledger_as_planned(demo_run: DemoRun) -> None:
    assert demo_run.code == 0, demo_run.err
    figures = demo_run.figures
    assert len(demo_run.out.splitlines()) == 1
    assert figures["sent"] == (figures["accepted"] + figures["duplicate"] + sum(figures["rejected"].values()))
    assert sum(figures["jobs"].values()) == 20
    expected = FoldedPlan(plan_of(20))
    # MQTT may deliver a message twice.
    assert figures["rejected"].keys() == expected.rejected().keys()
    assert all(figures["rejected"][reason] >= times for reason, times in expected.rejected().items())
    assert figures["receipts"]["rejected"] > 0 and figures["receipts"]["accepted"] > 0
    assert figures["duplicate"] >= expected.count("duplicate")
    assert 0 < figures["seconds"] < DEMO_S
    reader = LedgerReader(Settings(data_dir=demo_run.data_dir))
    events = reader.rows(LedgerFilter(type="job.event"), ["verdict"])
    assert events.rows.num_rows == figures["sent"]
    assert all(f"[{step}/7]" in demo_run.err for step in range(1, 8))


@pytest.mark.stack
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
    for reason in played.rejected():
        assert reason in shown
    assert "One job's timeline" in shown
    assert str(tmp_path / "tables" / "ledger") in shown
    assert f"{played.plan.sent} job events reached Kafka" in shown
    assert f"Receipts told the senders: {played.count('accepted')} accepted" in shown
    assert "echo is done" in shown
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
    assert own.dashboard.port != configured.dashboard.port
    assert own.data_path == tmp_path
    assert own.tables_root == str(tmp_path / "tables")
    three = KafkaSettings(bootstrap_servers="127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", replication_factor=3)
    own = stage_stack.own_settings(Settings(kafka=three), tmp_path)
    assert len(plans_of(own, ["kafka"])) == 1


def demo_settings(demo_run: DemoRun) -> Settings:
    """Settings whose Kafka nobody is: that of the demo has ended."""
    unheard = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    return Settings(data_dir=demo_run.data_dir, kafka=unheard)


def rows_of(demo_run: DemoRun, table: str, sql: str) -> list[tuple[Any, ...]]:
    """Return rows of a table of the demo, without the code of the notebooks."""
    rows = DeltaTable(str(demo_run.data_dir / "tables" / table)).to_pyarrow_dataset()
    return duckdb.from_arrow(rows).query("t", sql).fetchall()


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + STOP_S + 30)
def test_the_job_notebook_in_a_kernel_of_its_own_has_the_ends_of_the_demos_jobs(
    demo_run: DemoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (newest,) = rows_of(
        demo_run, "registry_jobs", "select job_id from t order by registered_at desc, job_id limit 1"
    )
    run = run_in_kernel("job_audit", demo_settings(demo_run), tmp_path, monkeypatch)
    ends = demo_run.figures["jobs"]
    assert f"http/operator {' '.join(str(ends[status]) for status in sorted(ends))}" in run.text
    (counts,) = rows_of(
        demo_run,
        "ledger",
        "select count(*) filter (late), count(*) filter (verdict = 'duplicate'),"
        " count(*) filter (verdict = 'rejected') from t where stream_kind = 'job'",
    )
    assert "{} late, {} duplicates, {} refused.".format(*counts) in run.text
    ((records,),) = rows_of(demo_run, "ledger", "select count(*) from t")
    assert f"{records} records, none missing, none twice" in run.text
    assert "The job is {}.".format(*newest) in run.text
    assert "of 20 registry rows stand at the ledger's end and agree with it" in run.text
    assert len(run.plots) == 4


@pytest.mark.timeout(DEMO_S + STOP_S + 30)
def test_the_message_notebook_has_who_wrote_to_whom_in_the_demo_and_how_long_it_took(
    demo_run: DemoRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_here("message_audit", demo_settings(demo_run), monkeypatch)
    pairs = rows_of(demo_run, "mailbox", "select sender, recipient, count(*) from t group by all")
    assert {(*pair, count) for pair, count in run.names["pairs"].items()} == set(pairs)
    waits = rows_of(
        demo_run,
        "mailbox",
        "select recipient, count(*), round(max(epoch_us(handed_at) - epoch_us(posted_at)) / 1e6, 3)"
        " from t where handed_at is not null group by all",
    )
    lines = [line.split() for line in run.text.splitlines()]
    shown = {(line[0], line[1], float(line[5])) for line in lines if len(line) == 6 and line[1].isdigit()}
    assert waits and {(name, str(count), longest) for name, count, longest in waits} <= shown
    assert f"{len(run.names['mailbox'])} messages, 2 tasks" in run.text and len(run.plots) == 4
    own = run_here("message_audit", demo_settings(demo_run), monkeypatch, {"agent": "echo"})
    assert (
        dict(own.names["pairs"]) == {pair: n for pair, n in run.names["pairs"].items() if "echo" in pair} != {}
    )


@pytest.mark.timeout(DEMO_S + STOP_S + 30)
def test_the_refusal_notebook_has_every_refusal_of_the_demo_and_the_gravest_in_full(
    demo_run: DemoRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_here("refusal_audit", demo_settings(demo_run), monkeypatch)
    counts = rows_of(demo_run, "ledger", "select reason, count(*) from t where reason is not null group by all")
    assert {reason: int(row.sum()) for reason, row in run.names["by_reason"].iterrows()} == dict(counts)
    assert set(dict(counts)) <= set(run.names["NEXT"]) and set(run.names["NEXT"]) == set(REASONS)
    forged = rows_of(
        demo_run, "ledger", "select stream_id, count(*) from t where reason = 'bad_signature' group by all"
    )
    assert forged and all(f"job/{job} {count} " in run.text for job, count in forged)
    # A secret came with it, and the notebook shows the row as it is: masked.
    assert "rejected, secret_in_event" in run.text and '"auth_token":"[masked]"' in run.text
    ((first,),) = rows_of(demo_run, "ledger", "select min(logged_at) from t where reason = 'malformed'")
    early = run_here("refusal_audit", demo_settings(demo_run), monkeypatch, {"until": first.isoformat()})
    assert "malformed" not in early.names["by_reason"].index
    late = run_here("refusal_audit", demo_settings(demo_run), monkeypatch, {"since": first.isoformat()})
    both = len(early.names["refused"]) + len(late.names["refused"])
    assert both == len(run.names["refused"]) and "malformed" in late.names["by_reason"].index
    place = "select partition || ':' || \"offset\" from t where reason = 'bad_signature' limit 1"
    ((forgery,),) = rows_of(demo_run, "ledger", place)
    chosen = run_here("refusal_audit", demo_settings(demo_run), monkeypatch, {"refusal": forgery})
    assert f"{forgery}: rejected, bad_signature" in chosen.text
    assert len(run.plots) == 2


@pytest.mark.timeout(DEMO_S + STOP_S + 30)
def test_the_agent_notebook_has_who_did_what_in_the_demo(
    demo_run: DemoRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_here("agent_audit", demo_settings(demo_run), monkeypatch)
    work, doors = run.names["work"], run.names["doors"]
    assert work.loc["operator", "delegated"] == sum(demo_run.figures["jobs"].values())
    sent = dict(rows_of(demo_run, "mailbox", "select sender, count(*) from t group by all"))
    assert {name: count for name, count in work["sent"].items() if count} == sent
    by_http = rows_of(demo_run, "ledger", "select principal, count(*) from t where door = 'http' group by all")
    assert {name: count for name, count in doors["http"].items() if count} == dict(by_http)
    # Events that the session's job sent over MQTT are the session's; what was refused is nobody's.
    ((session, job),) = rows_of(
        demo_run, "registry_jobs", "select session, job_id from t where session is not null"
    )
    of_jobs = rows_of(
        demo_run, "ledger", "select stream_id from t where door = 'mqtt' and verdict <> 'rejected'"
    )
    events = of_jobs.count((job,))
    assert doors.loc[session, "mqtt"] == events > 0
    assert {"console", "meta"} <= set(run.names["silent"].index) and "echo" not in run.names["silent"].index
    given = {"agent": "echo", "silent_s": 0}
    other = run_here("agent_audit", demo_settings(demo_run), monkeypatch, given)
    assert "The records in the name of echo:" in other.text and "echo" in other.names["silent"].index
    assert len(run.plots) == 2


@pytest.mark.timeout(DEMO_S + STOP_S + 30)
def test_the_custody_notebook_computes_a_demo_events_chain_again_and_sees_a_changed_byte(
    demo_run: DemoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = demo_settings(demo_run)
    # Two jobs may end in the same millisecond.
    by_end = "select ended_by, status, last_detail from t order by ended_at desc nulls last, ended_by desc"
    ends = rows_of(demo_run, "registry_jobs", by_end)
    by_itself = run_here("custody_audit", settings, monkeypatch)
    assert by_itself.names["row"].ce_id == ends[0][0] and by_itself.plots
    # Which of the demo's jobs ends last is drawn: its end may be masked, or no event of an agent but a
    # cancellation, whose chains have other links.
    event = next(ended_by for ended_by, *end in ends if end == ["completed", "all done"])
    run = run_here("custody_audit", settings, monkeypatch, {"event": event})
    by_time = 'select ce_id, partition, "offset", value from t order by logged_at, partition, "offset"'
    where = rows_of(demo_run, "ledger", by_time)
    partition, offset, value = next(rest for ce_id, *rest in where if ce_id == event)
    assert hashlib.sha256(value).hexdigest() in run.text and f"{partition}, {offset}" in run.text
    checks = run.names["chain"].set_index("what")["check"]
    for what in ("id from topic and bytes", "decided again", "signature", "row, last_offset"):
        assert checks[what] == "ok"
    # Before that commit the row was not in the table.
    table, version = DeltaTable(settings.table_path("ledger")), run.names["commit"].version
    for at, found in ((version, 1), (version - 1, 0)):
        table.load_as_version(at)
        wanted = (pc.field("partition") == partition) & (pc.field("offset") == offset)
        assert table.to_pyarrow_dataset().count_rows(wanted) == found
    # One byte of the signed text, in the file of the table.
    shutil.copytree(demo_run.data_dir, tmp_path / "touched")
    for file in (tmp_path / "touched" / "tables" / "ledger").glob("*.parquet"):
        rows = parquet.read_table(file)
        values = [v.replace(b'"seq":', b'"seq" :') if v == value else v for v in rows["value"].to_pylist()]
        place = rows.schema.get_field_index("value")
        parquet.write_table(rows.set_column(place, rows.schema.field(place), [values]), file)
    touched = settings.model_copy(update={"data_dir": tmp_path / "touched"})
    with pytest.raises(AssertionError, match=r"the chain is broken(?s:.*)id from topic and bytes"):
        run_here("custody_audit", touched, monkeypatch, {"event": f"{partition}:{offset}"})
