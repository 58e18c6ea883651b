"""The management server's two pipes: nothing but JSON-RPC on stdout, and no surprise when the input ends."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import httpx
import pytest

from connectors.programs.local_stack import free_port
from schemas.settings.settings import Settings
from tests.broker_processes import LOOPBACK
from tests.connectors.doors.mcp_tools.conftest import McpGateway
from tests.connectors.doors.mcp_tools.management.conftest import (
    environment,
    management,
    management_command,
    participants,
    refused,
    started,
)
from tests.mcp_protocol import ENVELOPE, INITIALIZE
from tests.programs import run_program

pytestmark = pytest.mark.requirement("AM-09")

# As a library that does not know whose stdout it is.
NOISY = """
import os, sys, warnings
from connectors.doors.mcp_tools.management import management_server, management_tools
from schemas.settings.settings import load_settings
def noisy(self, asked, call):
    print("a print"); os.write(1, b"a write\\n"); os.system("echo a child"); warnings.warn("a warning")
    return {"agents": []}
management_tools.ManagementTools.list_agents = noisy
sys.exit(management_server.serve(load_settings()))
"""


def called(identity: int, tool: str, **arguments: Any) -> dict[str, Any]:
    """A call as it stands on stdio, by the newer protocol."""
    params = {"name": tool, "arguments": arguments, "_meta": dict(ENVELOPE)}
    return {"jsonrpc": "2.0", "id": identity, "method": "tools/call", "params": params}


def piped(settings: Settings, *lines: Any, command: Sequence[str] = ()) -> Any:
    """The server with this input, to its end."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return run_program(command or management_command(), timeout_s=90, env=environment(settings), input=text)


def answers(done: Any) -> dict[Any, dict[str, Any]]:
    """The answers by their ids; every line is one."""
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(answer["jsonrpc"] == "2.0" for answer in found)
    return {answer["id"]: answer for answer in found if "id" in answer}


def test_calls_that_are_open_when_the_input_ends_are_finished_and_answered(
    gateway: McpGateway, operator: httpx.Client
) -> None:
    done = piped(
        gateway.settings,
        called(1, "spawn_agent", agentId="late", task="be answered"),
        called(2, "list_agents"),
    )
    found = answers(done)
    assert (done.returncode, done.stderr, found.keys()) == (0, "", {1, 2})
    assert found[1]["result"]["structuredContent"]["agentId"] == "late"
    assert [agent["id"] for agent in participants(operator)] == ["late"]


def test_nothing_but_json_rpc_comes_out_whatever_a_library_prints(settings: Settings) -> None:
    command = (sys.executable, "-c", NOISY)
    legacy = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": INITIALIZE}
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    call = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "list_agents"}}
    done = piped(settings, legacy, ready, "this is no JSON", "{}", listing, call, command=command)
    found = answers(done)
    assert done.returncode == 0
    for noise in ("a print", "a write", "a child", "a warning"):
        assert noise in done.stderr
    assert found[3]["result"]["structuredContent"] == {"agents": []}
    tools = {tool["name"]: tool for tool in found[2]["result"]["tools"]}
    agents, messages = {"spawn_agent", "list_agents", "stop_agent"}, {"send_message", "get_messages"}
    assert tools.keys() == agents | messages | {"mark_messages_read"}
    assert tools["spawn_agent"]["inputSchema"]["required"] == ["task"]
    assert {"agentId", "task", "capabilities"} <= tools["spawn_agent"]["inputSchema"]["properties"].keys()


def test_with_the_gateway_away_a_call_says_so_and_how_to_try_again_and_the_server_goes_on(
    settings: Settings,
) -> None:
    nowhere = settings.gateway.model_copy(update={"url": f"http://{LOOPBACK}:{free_port()}"})
    settings = settings.model_copy(update={"gateway": nowhere})

    async def use() -> None:
        async with management(settings) as host:
            reason, message = await refused(host, "spawn_agent", task="x", idempotencyKey="spawn-7")
            assert (reason, "trunkline up" in message) == ("unreachable", True)
            assert "again with idempotencyKey spawn-7" in message
            reason, message = await refused(host, "spawn_agent", task="x")
            assert "again with idempotencyKey" in message
            assert (await refused(host, "list_agents"))[0] == "unreachable"

    anyio.run(use)


def test_a_wrong_token_is_told_with_where_tokens_come_from(gateway: McpGateway) -> None:
    async def use() -> None:
        async with management(gateway.settings, TRUNKLINE_TOKEN="not-the-token") as host:
            reason, message = await refused(host, "list_agents")
            assert (reason, "TRUNKLINE_TOKEN" in message) == ("refused", True)
            assert "not-the-token" not in message

    anyio.run(use)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_and_without_a_word(settings: Settings, number: int) -> None:
    process = started(settings)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        initialize = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": INITIALIZE}
        process.stdin.write(json.dumps(initialize) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "trunkline-management"
        process.send_signal(number)
        assert process.wait(20) == -number
        assert (process.stdout.read(), process.stderr and process.stderr.read()) == ("", "")
    finally:
        process.kill()
        process.communicate()


def test_wrong_settings_end_it_with_2_and_nothing_on_stdout(settings: Settings) -> None:
    command = ["env", "TRUNKLINE__AGENT_MCP__COLOUR=red", *management_command()]
    done = piped(settings, command=command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "agent_mcp.colour" in done.stderr
