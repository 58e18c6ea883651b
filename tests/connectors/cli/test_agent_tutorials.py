"""The tutorials about a wrapped program and about an MCP host work as they are printed, at a real gateway."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from connectors.gateway_client.gateway_client import GatewayClient
from connectors.local_stack import free_port
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.connectors.cli.conftest import CommandLine
from tests.forked_programs import forked_command
from tests.programs import required_program

pytestmark = pytest.mark.requirement("AG-92")
PAGES = PROJECT_ROOT / "docs" / "tutorial"
END = "--- the end of a block ---"
# The command that a page starts in a second terminal.
IN_ANOTHER_TERMINAL = re.compile(r"^trunkline-agent run .*shout\.sh$")


class Block(NamedTuple):
    """A code block of a page."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, in order."""
    text = (PAGES / page).read_text(encoding="utf-8")
    found = [Block(*pair) for pair in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    assert {block.language for block in found} <= {"sh", "text", "json", "python"}
    return found


@pytest.fixture
def hub_settings(hub_settings: Settings) -> Settings:
    """Settings with the agent MCP door, and with a port of MQTT at which nobody listens."""
    door = hub_settings.agent_mcp.model_copy(update={"port": free_port()})
    mqtt = hub_settings.mqtt.model_copy(update={"port": free_port()})
    return hub_settings.model_copy(update={"agent_mcp": door, "mqtt": mqtt})


class Terminal:
    """A shell in a folder where `./trunkline` and `trunkline-agent` are, in which blocks are run."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._shell = subprocess.Popen(
            ["bash", "-u"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._others: list[subprocess.Popen[bytes]] = []

    def run(self, block: Block) -> str:
        """Run a block to its end; returns what it printed."""
        if IN_ANOTHER_TERMINAL.match(block.text.strip()):
            self._others.append(
                subprocess.Popen(shlex.split(block.text), cwd=self._folder, env=self._environment)
            )
            return ""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{block.text}\necho '{END}'\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        for line in self._shell.stdout:
            if line.strip() == END:
                return "".join(lines)
            lines.append(line)
        raise AssertionError(f"the shell has ended: {''.join(lines)}")

    def close(self) -> None:
        """End the shell and what runs beside it."""
        for process in (*self._others, self._shell):
            process.kill()
            process.wait()
        for stream in (self._shell.stdin, self._shell.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def terminal(trunkline: CommandLine, folder: Path) -> Iterator[Terminal]:
    """A terminal in a new folder, with our commands as they are installed."""
    folder.mkdir()
    programs = folder / "bin"
    programs.mkdir()
    for path, command in (
        (folder / "trunkline", forked_command("connectors.cli")),
        (programs / "trunkline-agent", forked_command("trunkline_agent.command")),
        (programs / "python", [sys.executable]),
    ):
        path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        path.chmod(0o755)
    environment = trunkline.environment()
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    found = Terminal(folder, environment)
    try:
        yield found
    finally:
        found.close()


def follow(page: str, shell: Terminal, folder: Path, names: dict[str, str]) -> list[str]:
    """Do what a page says. Each block `text` must be what the block before it printed at its end."""
    printed: list[str] = []
    for block in blocks(page):
        if block.language == "text":
            assert printed[-1].splitlines()[-len(block.text.splitlines()) :] == block.text.splitlines(), printed
        elif block.language == "sh":
            printed.append(shell.run(block))
        else:
            (folder / names[block.language]).write_text(block.text)
    return printed


def test_the_page_about_a_wrapped_program_works_as_it_is_printed(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    required_program("jq", "jq")
    folder = tmp_path / "host"
    with terminal(trunkline, folder) as shell:
        printed = follow("wrap_a_command_line_agent.md", shell, folder, {})
    assert any("exit code 1" in text for text in printed)


@pytest.mark.requirement("AG-91")
def test_the_page_about_an_mcp_host_works_as_it_is_printed(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    assert shutil.which("bash")
    folder = tmp_path / "host"
    with terminal(trunkline, folder) as shell:
        *_, drained = follow("from_an_mcp_host.md", shell, folder, {"json": "mcp.json", "python": "host.py"})
    assert "good morning" in drained
    assert "planner" in drained
