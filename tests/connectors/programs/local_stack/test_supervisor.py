"""`up`, `status`, `logs` and `down`: a stack that a process in the background looks after."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from connectors.plumbing.machine import state_file
from connectors.programs.local_stack import child_process
from connectors.programs.local_stack.data_files import LIMIT_BYTES
from connectors.programs.local_stack.part import child_environment
from connectors.programs.local_stack.ports import mqtt_answers
from connectors.programs.processes.session_host import SessionHost
from schemas.settings.settings import PROJECT_ROOT, Settings, ViewSettings
from tests.connectors.programs.local_stack.conftest import Cli, run_cli, still_running
from tests.programs import start_program

pytestmark = pytest.mark.stack

HANGS = "import signal; signal.pause()"
PartStatusReader = Callable[[str], dict[str, Any]]


def wait_until(condition: Callable[[], bool], within_s: float, what: str, every_s: float = 0.1) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s} s: {what}")
        time.sleep(every_s)


def supervisor(settings: Settings) -> dict[str, Any]:
    state = state_file.read_state(settings)
    assert state is not None
    return dict(state["supervisor"])


def test_a_killed_kafka_is_started_again(cli: Cli, part_status: PartStatusReader):
    assert cli("up", "--only", "kafka").returncode == 0
    killed = part_status("kafka")["pid"]
    os.kill(killed, signal.SIGKILL)

    def is_back() -> bool:
        now = part_status("kafka")
        return now["state"] == "ready" and now["pid"] != killed

    wait_until(is_back, 60, "Kafka is back")
    assert part_status("kafka")["restarts"] == 1


def test_up_twice_is_harmless_and_down_leaves_nothing(cli: Cli, stack_settings: Settings):
    first = cli("up", "--only", "mosquitto")
    assert (first.returncode, "Ready after" in first.stdout) == (0, True)
    running = supervisor(stack_settings)
    second = cli("up", "--only", "mosquitto")
    assert (second.returncode, "runs already" in second.stdout) == (0, True)
    assert supervisor(stack_settings) == running
    assert cli("down").returncode == 0
    assert still_running(stack_settings) == []
    assert not state_file.is_alive(running)
    again = cli("down")
    assert (again.returncode, "No part of a stack runs" in again.stdout) == (0, True)


def test_a_disk_that_takes_neither_state_nor_logs_stops_nothing_and_is_told_once(
    cli: Cli, stack_settings: Settings, part_status: PartStatusReader
):
    assert cli("up", "--only", "mosquitto").returncode == 0
    running, killed = supervisor(stack_settings), part_status("mosquitto")["pid"]
    logs = stack_settings.data_path / "logs"
    # Where the copy and the state should go there is something that cannot be written to.
    blocks = [logs / "mosquitto.log.1", state_file.state_path(stack_settings)]
    blocks[1].unlink()
    for block in blocks:
        block.mkdir()
    os.truncate(logs / "mosquitto.log", LIMIT_BYTES + 1)
    os.kill(killed, signal.SIGKILL)

    def told() -> str:
        return (logs / "supervisor.log").read_text()

    wait_until(lambda: "the state file cannot be written" in told(), 20, "the state is told")
    wait_until(lambda: "mosquitto.log cannot be kept bounded" in told(), 20, "the log is told")
    wait_until(lambda: mqtt_answers("127.0.0.1", stack_settings.mqtt.port), 20, "Mosquitto is back")
    assert state_file.is_alive(running)
    assert told().count("going on without") == 2
    for block in blocks:
        block.rmdir()
    wait_until(lambda: part_status("mosquitto")["state"] == "ready", 20, "the state is written again")
    assert supervisor(stack_settings) == running
    assert part_status("mosquitto")["pid"] != killed
    assert cli("down").returncode == 0
    assert still_running(stack_settings) == []


def test_ctrl_c_before_the_supervisor_has_said_anything_ends_it(stack_settings: Settings):
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "connectors.cli", "up", "--only", "mosquitto"],
        cwd=PROJECT_ROOT,
        env=child_environment(stack_settings),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def started() -> list[psutil.Process]:
        children = psutil.Process(process.pid).children()
        return [child for child in children if "connectors.programs.local_stack.supervisor" in child.cmdline()]

    try:
        wait_until(lambda: bool(started()), 30, "the supervisor's process", every_s=0.01)
        (child,) = started()
        # It gets no further before the signal is on its way.
        child.suspend()
        assert state_file.read_state(stack_settings) is None
        process.send_signal(signal.SIGINT)
        with suppress(psutil.NoSuchProcess):
            child.resume()
        assert process.wait(60) == 130
        assert not child.is_running()
        assert still_running(stack_settings) == []
        assert state_file.read_state(stack_settings) is None
    finally:
        for left in started() if process.poll() is None else [child]:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.wait(10)


@pytest.mark.requirement("OP-02")
def test_up_adds_the_parts_that_a_running_stack_lacks(
    cli: Cli, stack_settings: Settings, part_status: PartStatusReader
):
    assert cli("up", "--only", "mosquitto").returncode == 0
    before = part_status("mosquitto")
    more = cli("up", "--only", "mosquitto,kafka")
    assert (more.returncode, "Ready after" in more.stdout) == (0, True), more.stderr
    after = part_status("mosquitto")
    assert (after["pid"], after["restarts"]) == (before["pid"], 0)
    assert part_status("kafka")["state"] == "ready"
    others = stack_settings.model_copy(update={"views": ViewSettings(interval_ms=777)})
    refused = run_cli(others, "up", "--only", "files")
    assert refused.returncode == 4
    assert "files cannot be added" in refused.stderr and "TRUNKLINE__VIEWS__INTERVAL_MS" in refused.stderr
    known = run_cli(others, "up", "--only", "kafka")
    assert known.returncode == 0 and "TRUNKLINE__VIEWS__INTERVAL_MS" in known.stderr


@pytest.mark.requirement("OP-02")
def test_a_part_that_cannot_start_stops_no_other_and_comes_by_itself_when_it_can(
    cli: Cli, stack_settings: Settings, part_status: PartStatusReader
):
    port = stack_settings.mqtt.port
    with socket.create_server(("127.0.0.1", port)):
        failed = cli("up", "--only", "kafka,mosquitto")
        assert failed.returncode == 1
        assert f"mosquitto: cannot be started: port {port} (setting mqtt.port) is taken by" in failed.stderr
        assert "Traceback" not in failed.stderr
        assert part_status("kafka")["state"] == "ready"
        shown = cli("status")
        assert shown.returncode == 1 and f"port {port}" in shown.stdout
    wait_until(lambda: part_status("mosquitto")["state"] == "ready", 60, "it comes by itself")
    assert part_status("mosquitto")["restarts"] == 0


@contextmanager
def up_in_background(settings: Settings, parts: str) -> Iterator[subprocess.Popen[str]]:
    process = start_program(
        [sys.executable, "-P", "-m", "connectors.cli", "up", "--only", parts], env=child_environment(settings)
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.requirement("OP-03")
def test_of_two_ups_at_once_both_report_success(cli: Cli, stack_settings: Settings):
    with (
        up_in_background(stack_settings, "mosquitto") as first,
        up_in_background(stack_settings, "mosquitto") as second,
    ):
        said = [process.communicate(timeout=60) for process in (first, second)]
        assert [process.returncode for process in (first, second)] == [0, 0], said
    supervisor_log = (stack_settings.data_path / "logs" / "supervisor.log").read_text()
    assert "runs already" not in supervisor_log


@pytest.mark.requirement("OP-03")
def test_of_two_ups_that_a_down_interrupts_both_say_so(cli: Cli, stack_settings: Settings):
    with (
        up_in_background(stack_settings, "kafka") as first,
        up_in_background(stack_settings, "kafka") as second,
    ):

        def is_starting() -> bool:
            state = state_file.read_state(stack_settings)
            return state is not None and state["parts"].get("kafka", {}).get("state") == "starting"

        wait_until(is_starting, 30, "Kafka is starting")
        assert cli("down").returncode == 0
        for process in (first, second):
            _, error = process.communicate(timeout=60)
            # The slower of them may have begun after the end, and has started a stack of its own.
            if process.returncode != 0:
                assert "trunkline down or a signal stopped the stack before all parts were ready" in error
                assert "runs already" not in error
        assert {first.returncode, second.returncode} <= {0, 1}
        assert 1 in {first.returncode, second.returncode}


def test_the_parts_end_with_a_killed_supervisor_and_up_works_again(cli: Cli, stack_settings: Settings):
    cli("up", "--only", "mosquitto")
    os.kill(supervisor(stack_settings)["pid"], signal.SIGKILL)
    wait_until(lambda: still_running(stack_settings) == [], 30, "the parts end with their supervisor")
    assert cli("status").returncode == 1
    assert cli("up", "--only", "mosquitto").returncode == 0


def test_down_finds_what_a_killed_supervisor_left(cli: Cli, stack_settings: Settings):
    mark = child_process.mark_of(stack_settings.data_path, "streams")
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"],
        env={**os.environ, child_process.MARK: mark},
        start_new_session=True,
    )
    try:
        wait_until(lambda: still_running(stack_settings) != [], 30, "it has started")
        assert "Stopped" in cli("down").stdout
        assert left.wait(timeout=30) == -signal.SIGKILL
    finally:
        left.kill()


def test_status_shows_each_part(cli: Cli):
    assert cli("status").returncode == 1
    cli("up", "--only", "mosquitto")
    shown = cli("status", "--json")
    parts = {part["name"]: part for part in json.loads(shown.stdout)["parts"]}
    assert shown.returncode == 0
    assert parts["mosquitto"]["state"] == "ready"
    assert parts["mosquitto"]["rss_mb"] > 1
    assert parts["kafka"]["state"] == "stopped"


def test_logs_shows_the_end_of_a_log_and_says_when_there_is_none(cli: Cli, stack_settings: Settings):
    assert cli("logs").returncode == 3
    folder = stack_settings.data_path / "logs"
    folder.mkdir(parents=True)
    (folder / "kafka.log").write_text("one\ntwo\nthree\n")
    assert cli("logs", "kafka", "-n", "2").stdout == "two\nthree\n"
    assert cli("logs", "-n", "1").stdout == "kafka      | three\n"
    (folder / "xml_pump_2.log").write_text("four\n")
    assert cli("logs", "xml_pump_2").stdout == "four\n"
    assert "xml_pump_2 | four" in cli("logs").stdout
    (folder / "kafka_2.log").write_text("five\n")
    assert cli("logs", "kafka_2").stdout == "five\n"
    unknown = cli("logs", "xml_pump_3")
    assert unknown.returncode == 2 and "xml_pump_2, supervisor" in unknown.stderr


def test_doctor_names_the_key_file_that_others_can_read(cli: Cli, stack_settings: Settings):
    keys = stack_settings.key_file
    keys.parent.mkdir(parents=True)
    keys.write_text("{}")
    keys.chmod(0o644)
    answer = cli("doctor", "--json")
    checks = {check["check"]: check for check in json.loads(answer.stdout)["checks"]}
    assert answer.returncode == 1
    assert (checks["keys"]["level"], checks["keys"]["mend"]) == ("fail", f"chmod 600 {keys}")
    assert (checks["kafka"]["level"], checks["kafka"]["mend"]) == ("warn", "start it: trunkline up")


def test_doctor_is_content_with_a_running_stack(cli: Cli):
    cli("up", "--only", "kafka,mosquitto")
    answer = cli("doctor", "--json")
    checks = {check["check"]: check["level"] for check in json.loads(answer.stdout)["checks"]}
    assert answer.returncode == 0, answer.stdout
    assert {checks[name] for name in ("java", "kafka", "mqtt", "ports", "keys")} == {"ok"}


@pytest.mark.requirement("OP-09")
@pytest.mark.parametrize("use_tmux", [False, True])
def test_down_names_the_sessions_that_go_on_and_ends_them_when_asked(
    cli: Cli, stack_settings: Settings, other_settings: Settings, use_tmux: bool
):
    hosts = [SessionHost(one, use_tmux=use_tmux) for one in (stack_settings, other_settings)]
    runs = []
    try:
        for host in hosts:
            spec = host.prepare(
                "busy.one", [sys.executable, "-c", HANGS], folder=stack_settings.data_path, environment={}
            )
            host.keep("busy.one", spec)
            runs.append(host.start("busy.one", spec))
            host.release("busy.one", runs[-1])
        wait_until(lambda: all(host.running() for host in hosts), 30, "both run")
        said = cli("down").stdout
        assert f"Session busy.one goes on ({runs[0]}); to end all of them: trunkline down --sessions" in said
        assert runs[1] not in said, "another data directory's"
        assert hosts[0].alive(runs[0])
        ended = cli("down", "--sessions").stdout
        assert f"Session busy.one is ended ({runs[0]})." in ended
        assert not hosts[0].left_of(runs[:1])
        assert hosts[1].alive(runs[1])
        assert "Session" not in cli("down").stdout
    finally:
        for host, handle in zip(hosts, runs, strict=False):
            host.stop(handle)
