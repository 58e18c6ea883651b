"""Fixtures of the command line's tests: a real gateway, and `trunkline` as a user runs it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from connectors.cli.main import main
from connectors.hub.launcher.local_processes import stop_all
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.local_stack import free_port
from connectors.programs.processes.session_host import SessionHost
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import BrokerProcess, ProgramProcess, program_environment, wait_until
from tests.forked_programs import forked_command
from tests.own_settings import own_settings
from tests.programs import run_program, start_program

WAIT_S = 60.0


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The output of a command that succeeded and printed nothing but JSON."""
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


class CommandLine:
    """Runs `trunkline` with settings of its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started: list[subprocess.Popen[str]] = []

    def run(
        self, *arguments: str, stdin: str | None = None, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in a process of its own."""
        return run_program(
            [*forked_command("connectors.cli"), *arguments],
            timeout_s=WAIT_S,
            cwd=cwd or PROJECT_ROOT,
            env=self.environment() | environment,
            input=stdin,
        )

    def call(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end within this process: a second faster, and the same but for its start."""
        out, err = io.StringIO(), io.StringIO()
        with (
            patch.dict(os.environ, self.environment() | environment, clear=True),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            try:
                code = main(list(arguments))
            except SystemExit as ended:
                code = int(str(ended.code or 0))
        return subprocess.CompletedProcess(["trunkline", *arguments], code, out.getvalue(), err.getvalue())

    def json(self, *arguments: str, **environment: str) -> Any:
        """Run a command with `--json` to its end within this process; returns its output."""
        return json_of(self.call(*arguments, "--json", **environment))

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command; it is ended with the test."""
        process = start_program(
            [*forked_command("connectors.cli"), *arguments],
            env=self.environment() | environment,
            stdin=subprocess.DEVNULL,
        )
        self.started.append(process)
        return process

    def environment(self) -> dict[str, str]:
        """Return the environment of a command."""
        return program_environment(self.settings) | {"PYTHONPATH": str(PROJECT_ROOT)}

    def end(self) -> None:
        """End what was started."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=WAIT_S)


def with_gateway_port(settings: Settings) -> Settings:
    """Settings with a port of its own for the gateway."""
    gateway = settings.gateway.model_copy(
        update={"port": free_port(), "reactor_group": f"reactor-{settings.kafka.topic}"}
    )
    return settings.model_copy(update={"gateway": gateway})


@pytest.fixture
def hub_settings(backbone_settings: Settings) -> Settings:
    """`backbone_settings` with a port of its own for the gateway."""
    return with_gateway_port(backbone_settings)


@pytest.fixture
def gateway(hub_settings: Settings, tmp_path: Path) -> Iterator[ProgramProcess]:
    """A gateway that serves; ended with the test."""
    program = ProgramProcess("connectors.programs.gateway_program", hub_settings, tmp_path, "gateway")
    program.wait_ready(60)
    yield program
    program.kill()


@pytest.fixture
def next_gateway(hub_settings: Settings, tmp_path: Path) -> Iterator[Callable[[], ProgramProcess]]:
    """Starts a gateway after the first one, and waits until it serves; ended with the test."""
    started: list[ProgramProcess] = []

    def start() -> ProgramProcess:
        program = ProgramProcess("connectors.programs.gateway_program", hub_settings, tmp_path, "next-gateway")
        started.append(program)
        program.wait_ready(60)
        return program

    yield start
    for program in started:
        program.stop()


@pytest.fixture
def hub(gateway: ProgramProcess, hub_settings: Settings) -> Iterator[GatewayClient]:
    """A client with the operator's token."""
    with GatewayClient(hub_settings) as client:
        yield client


@pytest.fixture
def trunkline(hub_settings: Settings) -> Iterator[CommandLine]:
    """The command line on `hub_settings`; whatever was started is ended with the test."""
    found = CommandLine(hub_settings)
    yield found
    found.end()


@pytest.fixture(scope="module")
def unchanged(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CommandLine]:
    """The command line on a gateway for all tests of a file whose commands change nothing there."""
    folder = tmp_path_factory.mktemp("unchanged")
    settings = with_gateway_port(own_settings(kafka_broker, mosquitto_broker, folder))
    program = ProgramProcess("connectors.programs.gateway_program", settings, folder, "gateway")
    try:
        program.wait_ready()
        yield CommandLine(settings)
    finally:
        program.kill()


@pytest.fixture
def host(hub_settings: Settings) -> Iterator[SessionHost]:
    """The sessions of `hub_settings` on this machine; all of them are ended with the test."""
    if shutil.which("tmux") is None:
        pytest.fail("tmux is not installed: sudo apt-get install -y tmux")
    found = SessionHost(hub_settings)
    yield found
    done = found._tmux("list-sessions", "-F", "#{session_name}", check=False)
    for name in done.stdout.split() if done.returncode == 0 else ():
        found.stop(f"tmux/{found._socket}/{name}")
    Path("/tmp", f"tmux-{os.getuid()}", found._socket).unlink(missing_ok=True)  # noqa: S108  tmux leaves it


@pytest.fixture
def agents_end(hub: GatewayClient, hub_settings: Settings) -> Iterator[None]:
    """End the programs that tasks launched, and check that they have ended."""
    yield
    try:
        for task in hub.get(path_of("tasks"), {"status": "running"})["tasks"]:
            hub.post(path_of("tasks", task["id"], "cancel"))
        wait_until(lambda: recycled(hub), 40, "the end of what was launched")
    finally:
        left = stop_all(hub_settings)
    assert left == 0


def recycled(hub: GatewayClient) -> bool:
    """True if nothing that was launched is left."""
    found = hub.get(path_of("containers"), {"limit": 1000})["containers"]
    return all(container["state"] == "recycled" for container in found)


@pytest.fixture
def echo(hub: GatewayClient, agents_end: None) -> str:
    """The sample agent of conf/agents, defined; what is launched is ended with the test."""
    wait_until(lambda: "echo" in [a["name"] for a in hub.get(path_of("agents"))["agents"]], what="the agent")
    return "echo"


@pytest.fixture
def sent(backbone_settings: Settings) -> Callable[[Any], None]:
    """Sends a signal to a started command."""

    def send(process: subprocess.Popen[str], number: int = signal.SIGINT) -> None:
        os.kill(process.pid, number)

    return send


def read_line(process: subprocess.Popen[str], wanted: str, timeout_s: float = 40.0) -> str:
    """The next line of a started command's standard output that holds `wanted`."""
    output = process.stdout
    assert output is not None
    deadline = time.monotonic() + timeout_s
    seen: list[str] = []
    while True:
        # On a thread of its own: a pipe's readline cannot be told to give up.
        reader = threading.Thread(target=lambda: seen.append(output.readline()), daemon=True)
        count = len(seen)
        reader.start()
        reader.join(max(0.0, deadline - time.monotonic()))
        if len(seen) == count or not seen[-1]:
            pytest.fail(f"no {wanted!r} in: {seen}")
        if wanted in seen[-1]:
            return seen[-1]
