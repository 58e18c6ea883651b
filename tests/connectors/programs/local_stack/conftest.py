"""Settings of a stack of its own for each test, and a watch that nothing of it is left."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.programs.local_stack import child_process, free_port
from connectors.programs.local_stack.part import child_environment
from schemas.settings.settings import KafkaSettings, Settings
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
