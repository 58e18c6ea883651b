"""Settings of a stack of its own for each test, and a watch that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.programs.local_stack import child_process, free_port
from connectors.programs.local_stack.part import child_environment
from schemas.settings.settings import PROJECT_ROOT, KafkaSettings, Settings
from tests.broker_processes import wait_until
from tests.forked_programs import forked_command
from tests.own_settings import stack_settings as free_settings
from tests.programs import run_program

CLI_TIMEOUT_S = 150


def settings_in(folder: Path) -> Settings:
    """Settings with free ports and a data directory below the folder."""
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}", partitions=2)
    return free_settings(folder, kafka=kafka)


def still_running(settings: Settings) -> list[str]:
    """The command lines of all processes that belong to the stack of these settings."""
    found = []
    for process in child_process.marked_processes(child_process.mark_of(settings.data_path, "")):
        with suppress(psutil.NoSuchProcess):  # a zombie is one that has ended
            found.append(" ".join(process.cmdline())[:200])
    return found


@pytest.fixture
def stack_settings(tmp_path: Path) -> Iterator[Settings]:
    """Settings for one stack. The fixture kills all processes that a failed test leaves running."""
    settings = settings_in(tmp_path / "data")
    yield settings
    child_process.kill_marked(child_process.mark_of(settings.data_path, ""))


@pytest.fixture
def other_settings(tmp_path: Path) -> Iterator[Settings]:
    """Settings for a second stack."""
    settings = settings_in(tmp_path / "other")
    yield settings
    child_process.kill_marked(child_process.mark_of(settings.data_path, ""))


Cli = Callable[..., subprocess.CompletedProcess[str]]


def run_cli(settings: Settings, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `trunkline …` with these settings and variables."""
    return run_program(
        [*forked_command("connectors.cli"), *arguments],
        timeout_s=CLI_TIMEOUT_S,
        env=child_environment(settings) | variables,
    )


@pytest.fixture
def cli(stack_settings: Settings) -> Iterator[Cli]:
    """Runs `trunkline …` with the test's settings and these variables; at the end the stack is taken down."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_cli(stack_settings, *arguments, **variables)

    yield run
    run("down")


@pytest.fixture
def part_status(cli: Cli) -> Callable[[str], dict[str, Any]]:
    """Reads one part's line of `status --json`."""

    def read(name: str) -> dict[str, Any]:
        parts = json.loads(cli("status", "--json").stdout)["parts"]
        return next(part for part in parts if part["name"] == name)

    return read


class Foreground:
    """A part in the foreground as a process, its output in a file, with a socket as systemd has one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self.path = output
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Its address is in the abstract namespace, as that of a user's systemd may be.
        self.socket.bind(f"\0trunkline-test-{os.getpid()}-{id(self)}")
        self.socket.setblocking(False)
        self.told: list[str] = []
        notify = {"NOTIFY_SOCKET": "@" + self.socket.getsockname()[1:].decode(), "WATCHDOG_USEC": "2000000"}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=PROJECT_ROOT,
                env={**environment, **notify},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def heard(self) -> list[str]:
        """All that systemd was told so far."""
        while True:
            try:
                self.told += self.socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return self.told

    def lines(self) -> list[dict[str, str]]:
        """The lines of its log."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def wait_ready(self) -> None:
        """Wait until systemd was told that the part is ready."""
        wait_until(lambda: "READY=1" in self.heard() or self.process.poll() is not None, 60, "readiness")
        assert "READY=1" in self.heard(), self.path.read_text()

    def end(self) -> int:
        """Ask for its end as systemd does, and return its exit code."""
        self.heard()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        """End what a failed test leaves."""
        self.process.kill()
        self.process.wait(20)
        self.socket.close()


Started = Callable[[str], Foreground]


@pytest.fixture
def started(stack_settings: Settings, tmp_path: Path) -> Iterator[Started]:
    """Starts parts in the foreground, by `trunkline run`."""
    with ExitStack() as opened:

        def start(part: str) -> Foreground:
            command = [sys.executable, "-P", "-m", "connectors.cli", "run", part]
            found = Foreground(command, child_environment(stack_settings), tmp_path / f"{part}.out")
            opened.callback(found.close)
            return found

        yield start
