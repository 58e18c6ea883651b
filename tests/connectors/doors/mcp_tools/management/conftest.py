"""Fixtures of the management MCP server's tests: gateways with the agent MCP door, and the server itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from mcp import Client, StdioServerParameters

from connectors.hub.launcher.local_processes import stop_all
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import program_environment
from tests.connectors.doors.mcp_tools.conftest import PARTICIPANTS, McpGateway
from tests.forked_programs import forked_command
from tests.programs import start_program

CHECK_S = 0.5
# Beside the checkout's own: what is not there, and what only waits.
_RULES = {
    "test/none": {"command": ["{project}/no-such-program"]},
    "test/idle": {"command": ["{python}", "-S", "-c", "import time; time.sleep(600)"]},
}


@pytest.fixture
def settings(backbone_settings: Settings, tmp_path: Path) -> Settings:
    """Settings of gateways that look after their agents often."""
    rules = yaml.safe_load((PROJECT_ROOT / "conf" / "launchers.yaml").read_text())
    launchers = tmp_path / "launchers.yaml"
    launchers.write_text(yaml.safe_dump(rules | _RULES))
    gateway = backbone_settings.gateway.model_copy(
        update={
            "reactor_group": f"reactor-{backbone_settings.kafka.topic}",
            "task_check_s": CHECK_S,
            "stop_grace_s": 2.0,
            "launchers_file": launchers,
        }
    )
    return backbone_settings.model_copy(update={"gateway": gateway})


@pytest.fixture
def start_gateway(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., McpGateway]]:
    """Starts gateways on free ports and waits until they serve; they end with the test, and their agents."""
    started: list[McpGateway] = []

    def start(**changes: Any) -> McpGateway:
        """One gateway; `changes` are made to the section `agent_mcp`."""
        door = settings.agent_mcp.model_copy(update=changes)
        gateway = McpGateway(settings.model_copy(update={"agent_mcp": door}), tmp_path)
        started.append(gateway)
        gateway.wait_ready()
        return gateway

    yield start
    for gateway in started:
        with suppress(httpx.HTTPError), gateway.client() as operator:
            for agent in participants(operator):
                operator.post(f"{PARTICIPANTS}/{agent['id']}/stop")
        gateway.program.kill()
    stop_all(settings, 0.0)


@pytest.fixture
def gateway(start_gateway: Callable[..., McpGateway]) -> McpGateway:
    """One running gateway."""
    return start_gateway()


@pytest.fixture
def operator(gateway: McpGateway) -> Iterator[httpx.Client]:
    """A client with the operator's token."""
    with gateway.client() as client:
        yield client


def participants(operator: httpx.Client, **wanted: str) -> list[dict[str, Any]]:
    """Return the participants as the hub shows them."""
    return list(operator.get(PARTICIPANTS, params=wanted).json()["participants"])


def shown(operator: httpx.Client, name: str) -> dict[str, Any]:
    """One participant, as the hub shows it."""
    return dict(operator.get(f"{PARTICIPANTS}/{name}").json())


def key_files(settings: Settings) -> list[Path]:
    """All that lies in the folder of the keys."""
    folder = settings.agent_keys_path
    return sorted(folder.iterdir()) if folder.is_dir() else []


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment of the server."""
    # Buffered, as a host starts it: what is printed then comes out late, where it could do harm.
    own = {"PYTHONPATH": str(PROJECT_ROOT), "PATH": os.environ["PATH"], "PYTHONUNBUFFERED": ""}
    return program_environment(settings) | own


def management_command() -> list[str]:
    """Return the command that starts the server."""
    return [*forked_command("connectors.cli"), "mcp", "management"]


def management(settings: Settings, mode: Any = "auto", **variables: str) -> Any:
    """The official client of a management server that it starts."""
    words = management_command()
    command = StdioServerParameters(
        command=words[0],
        args=words[1:],
        env=environment(settings) | variables,
        cwd=PROJECT_ROOT,
    )
    return Client(command, mode=mode, read_timeout_seconds=60)


async def done(client: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return the answer of a tool, which must not be an error."""
    found = await client.call_tool(tool, arguments)
    assert not found.is_error, found.content
    return dict(found.structured_content)


async def refused(client: Any, tool: str, **arguments: Any) -> tuple[str, str]:
    """Reason and message of a tool's error."""
    found = await client.call_tool(tool, arguments)
    assert found.is_error, found.content
    said = dict(found.structured_content)
    assert found.content[0].text == f"{said['reason']}: {said['message']}"
    return said["reason"], said["message"]


def started(settings: Settings) -> subprocess.Popen[str]:
    """A management server with its input and output in our hands."""
    return start_program(management_command(), env=environment(settings), stdin=subprocess.PIPE)
