"""`trunkline run PART`: one part in the foreground, as systemd or a container starts it."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from connectors.cli.main import main
from connectors.programs.local_stack.foreground import Notifier, as_json_line
from schemas.settings.settings import Settings
from tests.broker_processes import wait_until
from tests.connectors.programs.local_stack.conftest import Cli, Foreground, Started, still_running


def see_it_hang(gateway: Foreground) -> None:
    """While a gateway does not answer, systemd gets no sign of life."""
    (program,) = [
        one
        for one in psutil.Process(gateway.process.pid).children(recursive=True)
        if "connectors.programs.gateway_program" in one.cmdline()
    ]
    program.suspend()
    try:
        # A systemd that reads nothing meanwhile keeps the part from nothing: ten messages fill its socket.
        wait_until(lambda: "does not answer" in gateway.path.read_text(), 60, "a silent gateway is seen")
        silent = gateway.heard().count("WATCHDOG=1")
        with pytest.raises(pytest.fail.Exception):
            wait_until(lambda: gateway.heard().count("WATCHDOG=1") > silent, 4, "no sign of life")
    finally:
        program.resume()
    wait_until(lambda: gateway.heard().count("WATCHDOG=1") > silent, 30, "a sign of life")


@pytest.mark.requirement("DP-01")
@pytest.mark.requirement("DP-02")
@pytest.mark.requirement("DP-03")
@pytest.mark.stack
def test_parts_run_side_by_side_and_tell_systemd_that_they_are_ready_and_whether_they_answer(
    started: Started, stack_settings: Settings, cli: Cli
) -> None:
    kafka = started("kafka")
    assert cli("run", "kafka", "--health").returncode == 1
    kafka.wait_ready()
    gateway = started("gateway")
    gateway.wait_ready()
    # A start that makes progress asks for more time, and a part that is well says so again and again.
    assert any(one.startswith("EXTEND_TIMEOUT_USEC=") for one in kafka.heard())
    before = gateway.heard().count("WATCHDOG=1")
    wait_until(lambda: gateway.heard().count("WATCHDOG=1") > before + 1, 10, "signs of life")
    assert cli("run", "kafka", "--health").returncode == 0
    assert cli("run", "gateway", "--health").returncode == 0
    # Its data directory is in use.
    again = cli("run", "kafka")
    assert again.returncode == 4 and "kafka already runs" in again.stderr
    for command in (("up", "--only", "mosquitto"), ("down",)):
        refused = cli(*command)
        assert refused.returncode == 4 and "under another supervisor" in refused.stderr
    assert kafka.process.poll() is None
    see_it_hang(gateway)
    assert (gateway.end(), kafka.end()) == (0, 0)
    assert gateway.heard()[-1] == kafka.heard()[-1] == "STOPPING=1"
    assert still_running(stack_settings) == []
    log = gateway.lines()
    assert log and all({"timestamp", "event"} <= line.keys() for line in log)


@pytest.mark.requirement("DP-01")
@pytest.mark.stack
def test_a_part_whose_process_ends_ends_too_and_says_how(
    started: Started, stack_settings: Settings, cli: Cli
) -> None:
    mosquitto = started("mosquitto")
    mosquitto.wait_ready()
    (child,) = [
        one
        for one in psutil.Process(mosquitto.process.pid).children()
        if "mosquitto" in " ".join(one.cmdline())
    ]
    child.kill()
    assert mosquitto.process.wait(20) == 1
    # Its last line is JSON as all others are.
    assert mosquitto.lines()[-1]["event"].startswith("mosquitto ended with exit code -9")
    assert cli("run", "mosquitto", "--health").returncode == 1
    assert still_running(stack_settings) == []


@pytest.mark.requirement("DP-02")
def test_without_systemd_nobody_is_told() -> None:
    for environment in ({}, {"NOTIFY_SOCKET": "/nowhere/at/all"}):
        notifier = Notifier(environment)
        notifier.tell("READY=1")
        assert not notifier.has_watchdog


@pytest.mark.requirement("DP-02")
@pytest.mark.parametrize(
    ("environment", "is_there"),
    [
        ({"WATCHDOG_USEC": "60000000"}, True),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
    ],
)
def test_a_watchdog_is_known_by_its_variables(environment: dict[str, str], is_there: bool) -> None:
    assert Notifier(environment).has_watchdog == is_there


@pytest.mark.requirement("DP-02")
def test_systemd_is_told_at_a_path_too(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")}).tell("READY=1", "STATUS=well")
        assert systemd.recv(100) == b"READY=1\nSTATUS=well"


@pytest.mark.requirement("DP-03")
def test_each_line_of_a_log_is_a_json_object() -> None:
    own = '{"timestamp": "2026-11-30T10:00:00Z", "event": "ready"}'
    assert as_json_line(own, "gateway") == own
    for line in (
        "1764500000: mosquitto running",
        "{not json",
        "[1]",
        "",
        "[" * 100_000,
        '{"a":' * 100_000,
        "\x00\x1b[31m\ud800",
    ):
        found = json.loads(as_json_line(line, "mosquitto"))
        assert (found["part"], found["event"]) == ("mosquitto", line)
    java = "2026-11-30T10:00:00.123 WARN  o.a.k.Broker: it is full: 7"
    found = json.loads(as_json_line(java, "kafka"))
    assert (found["level"], found["logger"], found["event"]) == ("warn", "o.a.k.Broker", "it is full: 7")


@pytest.mark.requirement("DP-01")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "set TRUNKLINE_PART"),
        (["everything"], "no such part: everything"),
        (["xml_pump_3"], "the settings want xml_pump, xml_pump_2"),
        (["xml_pump_2", "--health"], ""),
    ],
)
def test_a_part_that_there_is_not_is_named(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRUNKLINE_PART", raising=False)
    monkeypatch.setenv("TRUNKLINE__DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TRUNKLINE__XML_PUMP__PROCESSES", "2")
    assert main(["run", *arguments]) == (2 if said else 1)
    assert said in capsys.readouterr().err
