"""`trunkline sessions`, `jobs submit` and `monitor` with a real gateway, bridge, tmux and a small agent."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.processes.session_host import SessionHost
from connectors.programs.processes.session_registry_client import create_session
from connectors.programs.processes.session_runner import HANDLE_VARIABLE
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import wait_until
from tests.connectors.cli.conftest import CommandLine, json_of, read_line
from trunkline_agent.errors import Refused

AGENT = (sys.executable, "-m", "connectors.tools.samples.sample_agent")
SLEEPER = (sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)")


def _status(hub: GatewayClient, kind: str, name: str) -> str:
    found: str = hub.get(path_of(kind, name))["status"]
    return found


@pytest.mark.requirement("JE-14")
def test_a_session_is_created_stopped_resumed_and_ended_here_and_in_the_registry(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost
) -> None:
    row = json_of(trunkline.call("sessions", "create", "desk.1", "--json", "--", *SLEEPER))
    assert (row["status"], row["host"], row["handle"].split("/")[0]) == ("running", host.name, "tmux")
    wait_until(lambda: "here" in host.capture("desk.1", row["handle"]), what="the command")
    taken = trunkline.call("sessions", "create", "desk.1", "--", *SLEEPER)
    assert taken.returncode == 4
    assert "already" in taken.stderr
    assert host.alive(row["handle"])
    stop = ("sessions", "stop", "desk.1", "--capture-id", "c-1", "--reason", "lunch", "--graceful", "--json")
    stopped = trunkline.call(*stop)
    assert "c-1.txt" in stopped.stderr
    assert "here" in (host.folder("desk.1") / "captures" / "c-1.txt").read_text()
    after = json.loads(stopped.stdout)
    assert (after["status"], after["reason"], after["capture_id"]) == ("stopped", "lunch", "c-1")
    assert not host.alive(row["handle"])
    again = trunkline.json("sessions", "resume", "desk.1")
    assert (again["status"], host.alive(again["handle"])) == ("running", True)
    assert again["handle"] != row["handle"]
    assert trunkline.call("sessions", "stop", "desk.1", "--mode", "soft").returncode == 0
    assert host.alive(again["handle"])
    assert trunkline.json("sessions", "resume", "desk.1")["handle"] == again["handle"]
    assert trunkline.call("sessions", "stop", "desk.1", "--mode", "hard").returncode == 0
    assert (host.alive(again["handle"]), host.is_prepared("desk.1")) == (False, False)
    assert trunkline.call("sessions", "resume", "desk.1").returncode == 4
    assert trunkline.call("sessions", "stop", "nobody").returncode == 3
    assert "terminated" in trunkline.call("sessions", "list").stdout


@pytest.mark.requirement("JE-14")
def test_what_the_registry_refuses_is_not_left_running(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost
) -> None:
    refused = trunkline.call("sessions", "create", "s1", "--description", "x" * 501, "--", *SLEEPER)
    assert refused.returncode == 2
    assert not host.is_prepared("s1")
    assert [p for p in psutil.process_iter(["environ"]) if _handle(p).startswith(f"tmux/{host._socket}/")] == []


@pytest.mark.requirement("JE-14")
@pytest.mark.requirement("CM-05")
def test_of_two_who_create_one_session_at_once_one_wins_and_runs_its_own_command(
    hub: GatewayClient, hub_settings: Settings, host: SessionHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both have found the name free and written what they run before either begins.
    both = threading.Barrier(2, timeout=30)
    prepare = SessionHost.prepare

    def prepared(*what: Any, **more: Any) -> Path:
        spec = prepare(*what, **more)
        both.wait()
        return spec

    monkeypatch.setattr(SessionHost, "prepare", prepared)

    def create(who: str) -> str | None:
        command = [sys.executable, "-c", f"import time; print('I am {who}', flush=True); time.sleep(600)"]
        try:
            with GatewayClient(hub_settings) as gateway:
                row = create_session(gateway, SessionHost(hub_settings), "twin", command)
        except Refused:
            return None
        return str(row["handle"])

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip("AB", pool.map(create, "AB"), strict=True))
    (winner,) = (who for who, handle in found.items() if handle is not None)
    handle = found[winner]
    assert handle is not None
    assert hub.get(path_of("sessions", "twin"))["handle"] == handle
    host.release("twin", handle)
    wait_until(lambda: "I am" in host.capture("twin", handle), what="the command")
    assert f"I am {winner}" in host.capture("twin", handle)
    assert len(list(host.folder("twin").glob("spec-*.json"))) == 1
    host.stop(handle)
    again = host.start("twin")
    host.release("twin", again)
    wait_until(lambda: f"I am {winner}" in host.capture("twin", again), what="the command again")


def _handle(process: psutil.Process) -> str:
    return str((process.info["environ"] or {}).get(HANDLE_VARIABLE, ""))


def _submit(*more: str) -> tuple[str, ...]:
    return ("jobs", "submit", "build the docs", "--session", "builder", "--timeout", "60s", *more)


@pytest.mark.requirement("JE-24")
@pytest.mark.requirement("CM-05")
def test_submit_has_an_agent_do_the_job_in_a_session_of_its_own(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost, start_bridge: Any, hub_settings: Settings
) -> None:
    start_bridge(hub_settings)
    # An older job that any session may have: it is not ours.
    older = hub.post(path_of("jobs"), {"description": "somebody else's"})["job_id"]
    instructions = "progress reading\npermission publish it\n"
    arguments = _submit("--instructions", "-", "--json", "--", *AGENT)
    done = trunkline.run(*arguments, stdin=instructions)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    job = told["job_id"]
    assert (told["status"], told["exit_code"]) == ("completed", 0)
    out = Path(told["subscriber_out"])
    assert out.name == f"{job}.subscriber.out"
    events = [json.loads(line)["event"] for line in out.read_text().splitlines()]
    assert events == ["started", "progress", "permission_required", "completed"]
    for shown in (*events, f"trunkline jobs export {job}"):
        assert shown in done.stderr
    row = hub.get(path_of("jobs", job))
    assert (row["session"], row["status"], row["events"]) == ("builder", "completed", 4)
    assert _status(hub, "jobs", older) == "pending"
    wait_until(lambda: _status(hub, "sessions", "builder") == "terminated", what="the session closed")
    secret = (hub_settings.data_path / "job-secrets" / job).read_text().strip()
    assert secret not in done.stdout + done.stderr + host.capture("builder", None)
    assert not host.is_prepared("builder")
    again = trunkline.call(*_submit("--", *AGENT))
    assert again.returncode == 4
    assert hub.get(path_of("jobs"))["total"] == 2


@pytest.mark.requirement("JE-24")
def test_submit_ends_as_watch_does_and_says_when_an_agent_ends_without_a_word(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost, start_bridge: Any, hub_settings: Settings
) -> None:
    start_bridge(hub_settings)
    failed = trunkline.start(*_submit("--json", "--", "sh", "-c", f"echo fail it is red | {shlex.join(AGENT)}"))
    out, err = failed.communicate(timeout=60)
    assert (failed.returncode, json.loads(out)["status"]) == (1, "error"), err
    arguments = ("jobs", "submit", "x", "--session", "slow", "--timeout", "1s", "--json", "--", *SLEEPER)
    late = trunkline.run(*arguments)
    assert late.returncode == 2
    assert json.loads(late.stdout)["status"] == "running"
    assert host.alive(hub.get(path_of("sessions", "slow"))["handle"])
    quits = trunkline.run("jobs", "submit", "x", "--session", "quits", "--", "sh", "-c", "echo oh dear; exit 7")
    assert quits.returncode == 1
    assert "ended with exit code 7" in quits.stderr
    assert "| oh dear" in quits.stderr
    assert "trunkline jobs cancel" in quits.stderr


@pytest.mark.requirement("HB-07")
def test_a_submitted_agent_learns_how_to_publish_from_what_it_reads(
    hub: GatewayClient, trunkline: CommandLine, start_bridge: Any, hub_settings: Settings, tmp_path: Path
) -> None:
    start_bridge(hub_settings)
    # An agent that knows nothing of Trunkline: it runs the commands that it reads.
    reads = ("sh", "-c", f"tee {tmp_path}/read | sed -n 's/^#   //p' | sh")
    arguments = ("--timeout", "60s", "--instructions", "-", "--json", "--", *reads)
    done = trunkline.run("jobs", "submit", "x", "--session", "told", *arguments, stdin="count the stars\n")
    assert done.returncode == 0, done.stderr
    events = [
        json.loads(line) for line in Path(json.loads(done.stdout)["subscriber_out"]).read_text().splitlines()
    ]
    assert [event["event"] for event in events] == ["started", "progress", "completed"]
    assert (tmp_path / "read").read_text().endswith("# Your instructions:\ncount the stars\n")
    script = f"'{PROJECT_ROOT}/trunkline' publish --job $TRUNKLINE_JOB_ID --event completed --detail ok\n"
    bare = ("--bare-instructions", *arguments[:-1], f"tee {tmp_path}/bare | sh")
    assert trunkline.run("jobs", "submit", "x", "--session", "bare", *bare, stdin=script).returncode == 0
    assert (tmp_path / "bare").read_text() == script


@pytest.mark.requirement("JE-24")
def test_ctrl_c_cancels_nothing_and_says_how_to_go_on(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost, start_bridge: Any, sent: Any
) -> None:
    process = trunkline.start("jobs", "submit", "x", "--session", "long", "--", *SLEEPER)
    row = wait_until(lambda: _row(hub, "long"), 40, what="the session")
    wait_until(lambda: "here" in host.capture("long", row["handle"]), what="the command")
    sent(process)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    job = row["for_job"]
    for said in ("goes on", f"trunkline watch --job {job}", f"trunkline jobs cancel {job}"):
        assert said in err
    assert _status(hub, "jobs", job) == "running"
    assert host.alive(row["handle"])


def _row(hub: GatewayClient, session: str) -> Any:
    found = [row for row in hub.get(path_of("sessions"))["sessions"] if row["session"] == session]
    return found[0] if found else None


@pytest.mark.requirement("JE-25")
def test_monitor_shows_how_the_reactor_closes_a_session_and_mends_drift_both_ways(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost
) -> None:
    watching = trunkline.start("monitor", "--json", "--mend")
    job = hub.post(path_of("jobs"), {"description": "x", "session": "s1"})["job_id"]
    assert json.loads(read_line(watching, job))["row"]["status"] == "pending"
    hub.post(path_of("sessions"), {"session": "s1", "for_job": job})
    hub.post(path_of("jobs", "pick"), {"session": "s1"})
    hub.post(path_of("jobs", job, "cancel"))
    closed = json.loads(read_line(watching, '"terminated"'))
    assert (closed["name"], closed["status_before"], closed["by"]) == ("s1", "running", "reactor/reactor")
    # A session that dies while its job runs.
    second = hub.post(path_of("jobs"), {"description": "y", "session": "s2"})["job_id"]
    dies = json_of(trunkline.call("sessions", "create", "s2", "--json", "--", *SLEEPER))
    hub.post(path_of("jobs", "pick"), {"session": "s2"})
    host.stop(dies["handle"])
    drift = json.loads(read_line(watching, "job_without_session"))
    assert (drift["job_id"], drift["outcome"]) == (second, f"job {second} is cancelled")
    # A session that was released while its job ran, and is taken back after the job has ended.
    third = hub.post(path_of("jobs"), {"description": "z"})["job_id"]
    late = json_of(trunkline.call("sessions", "create", "s3", "--job", third, "--json", "--", *SLEEPER))
    hub.post(path_of("sessions", "s3", "stop"), {"mode": "soft"})
    hub.post(path_of("jobs", third, "cancel"))
    wait_until(lambda: hub.get(path_of("sessions", "s3"))["jobs_ended"] == 1, what="the reactor has told it")
    hub.post(path_of("sessions", "s3", "resume"))
    drift = json.loads(read_line(watching, "session_without_job"))
    assert (drift["session"], drift["outcome"]) == ("s3", "session s3 is terminated")
    wait_until(lambda: not host.alive(late["handle"]), what="its process ended")


@pytest.mark.requirement("HB-01")
def test_the_process_of_a_session_made_for_a_job_ends_with_the_job_without_a_pick(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost
) -> None:
    job = hub.post(path_of("jobs"), {"description": "x"})["job_id"]
    made = json_of(trunkline.call("sessions", "create", "s1", "--job", job, "--json", "--", *SLEEPER))
    hub.post(path_of("jobs", job, "cancel"))
    wait_until(lambda: not host.alive(made["handle"]), 30, what="its process ended")
    assert hub.get(path_of("sessions", "s1"))["status"] == "terminated"


@pytest.mark.requirement("JE-25")
@pytest.mark.requirement("CM-06")
def test_monitor_once_reports_drift_by_its_exit_code_and_shows_what_agents_wrote_escaped(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost
) -> None:
    job = hub.post(path_of("jobs"), {"description": "x", "session": "s1"})["job_id"]
    hub.post(path_of("sessions"), {"session": "s1", "description": "bidi \u202e"})
    hub.post(path_of("jobs", "pick"), {"session": "s1"})
    assert trunkline.call("monitor", "--once").returncode == 0
    hub.post(path_of("sessions", "s1", "stop"), {"mode": "stop", "reason": "bidi \u202e"})
    found = trunkline.call("monitor", "--once")
    assert found.returncode == 1
    assert f"job {job}: the job runs, its session is stopped" in found.stdout
    assert "\u202e" not in found.stdout
    # It is kept for a resume, and so is its job, whatever monitor is told.
    assert trunkline.call("monitor", "--once", "--mend").returncode == 1
    assert _status(hub, "jobs", job) == "running"
    hub.post(path_of("sessions", "s1", "stop"), {"mode": "hard"})
    mended = trunkline.call("monitor", "--once", "--mend")
    assert (mended.returncode, f"job {job} is cancelled" in mended.stdout) == (0, True)
    assert trunkline.call("monitor", "--once").returncode == 0


@pytest.mark.requirement("JE-25")
def test_monitor_draws_a_live_table_in_a_real_terminal(
    hub: GatewayClient, trunkline: CommandLine, host: SessionHost, hub_settings: Settings
) -> None:
    hub.post(path_of("jobs"), {"description": "draw \u202e me"})
    # A real terminal: a tmux pane.
    spec = host.prepare(
        "screen",
        [sys.executable, "-m", "connectors.cli", "monitor"],
        folder=Path.cwd(),
        environment=trunkline.environment(),
    )
    handle = host.start("screen", spec)
    host.release("screen", handle)
    wait_until(lambda: "draw \\u202e me" in host.capture("screen", handle), 40, what="the table")
    job = hub.post(path_of("jobs"), {"description": "second"})["job_id"]
    wait_until(lambda: job in host.capture("screen", handle), 20, what="the new job")
    shown = host.capture("screen", handle)
    assert "Jobs (2)" in shown
    assert "Sessions (0)" in shown
    keys = ["tmux", "-L", host._socket, "send-keys", "-t", f"={handle.split('/')[2]}:", "C-c"]
    subprocess.run(keys, check=True, timeout=10)
    end = wait_until(lambda: host.end_of("screen", handle), what="the end")
    assert end.exit_code == 130
