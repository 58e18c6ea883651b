"""Agents that an MCP host spawns, lists and stops: real processes, a real gateway, the official client."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import psutil
import pytest

from connectors.programs.local_stack.ports import free_port
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import processes_with
from tests.connectors.doors.mcp_tools.conftest import McpGateway
from tests.connectors.doors.mcp_tools.management.conftest import (
    CHECK_S,
    done,
    key_files,
    management,
    participants,
    refused,
    shown,
)

pytestmark = pytest.mark.requirement("AM-09")

MESSAGES = "/api/hub/messages"


def told(operator: httpx.Client) -> list[tuple[str, Any]]:
    """Return the senders and texts of the operator's messages."""
    found = operator.get("/api/hub/mailboxes/default/operator").json()["messages"]
    return [(message["sender"], message["body"]) for message in found]


def wait_status(operator: httpx.Client, name: str, status: str, timeout_s: float = 20) -> dict[str, Any]:
    """The participant, once it has this status."""
    wait_until(lambda: shown(operator, name)["status"] == status, timeout_s, f"{name} is {status}")
    return shown(operator, name)


@pytest.mark.requirement("AM-05")
@pytest.mark.requirement("HB-08")
def test_a_spawned_agent_finds_its_key_reports_answers_is_listed_and_stopped_and_its_key_is_gone(
    gateway: McpGateway, operator: httpx.Client
) -> None:
    dashboard = gateway.settings.dashboard.model_copy(update={"port": free_port()})
    settings = gateway.settings.model_copy(update={"dashboard": dashboard})

    def work() -> None:
        wait_status(operator, "mailer", "idle")
        (file,) = key_files(settings)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        (process,) = processes_with(str(file))
        environment = psutil.Process(process).environ()
        assert (environment["AGENT_ID"], environment["MCP_SERVER_URL"]) == ("mailer", gateway.mcp_url)
        body = {"recipient": "mailer", "type": "ask", "payload": {"text": "how are you?"}}
        assert operator.post(MESSAGES, json=body).status_code == 200
        wait_until(lambda: told(operator), what="its answer")
        ((sender, text),) = told(operator)
        assert (sender, "was told" in text, "how are you?" in text) == ("mailer", True, True)
        wait_status(operator, "mailer", "idle")

    def gone() -> None:
        wait_until(lambda: not key_files(settings), what="the end of its key")
        wait_until(
            lambda: not processes_with("AGENT_ID") or not _alive(settings), what="the end of its process"
        )
        body = {"recipient": "mailer", "type": "ask", "payload": "still there?"}
        assert operator.post(MESSAGES, json=body).status_code == 404

    async def use() -> None:
        async with management(settings) as host:
            made = await done(
                host, "spawn_agent", agentId="mailer", task="sum up the mail", capabilities=["sum"]
            )
            assert (made["agentId"], made["task"], made["capabilities"]) == (
                "mailer",
                "sum up the mail",
                ["sum"],
            )
            assert abs(made["startedAt"] / 1000 - time.time()) < 60
            assert made["dashboardUrl"] == f"http://127.0.0.1:{settings.dashboard.port}/"
            await anyio.to_thread.run_sync(work)
            (listed,) = (await done(host, "list_agents"))["agents"]
            assert (listed["agentId"], listed["status"]) == ("mailer", "idle")
            stopped = await done(host, "stop_agent", agentId="mailer")
            assert (stopped["status"], "stoppedAt" in stopped) == ("stopped", True)
            assert (await done(host, "stop_agent", agentId="mailer"))["status"] == "stopped"
            assert (await done(host, "list_agents"))["agents"] == []
            await anyio.to_thread.run_sync(gone)
            # Its name is free again.
            again = await done(host, "spawn_agent", agentId="mailer", task="once more")
            assert (again["agentId"], again["task"]) == ("mailer", "once more")

    anyio.run(use)


def _alive(settings: Any) -> list[int]:
    return processes_with(str(settings.agent_keys_path))


def test_an_agent_that_is_killed_is_seen_as_stopped_within_the_check_interval(
    gateway: McpGateway, operator: httpx.Client
) -> None:
    async def spawn() -> str:
        async with management(gateway.settings, mode="legacy") as host:
            return str((await done(host, "spawn_agent", task="wait for the end"))["agentId"])

    name = anyio.run(spawn)
    # It outlives the server that was asked to start it.
    wait_status(operator, name, "idle")
    for process in _alive(gateway.settings):
        os.kill(process, signal.SIGKILL)
    killed_at = time.monotonic()
    row = wait_status(operator, name, "stopped")
    # The check, and what is settled after it: container, task, participant.
    assert time.monotonic() - killed_at < CHECK_S + 10
    assert row["keys"] == []
    wait_until(lambda: not key_files(gateway.settings), what="the end of its key")


@pytest.mark.parametrize(
    ("image", "why"),
    [("test/none", "no-such-program"), ("test/nobody-runs-this", "test/nobody-runs-this")],
)
def test_a_spawn_that_fails_tells_why_and_leaves_no_key_and_no_participant(
    start_gateway: Callable[..., McpGateway], image: str, why: str
) -> None:
    gateway = start_gateway(spawn_image=image)

    async def use() -> None:
        async with management(gateway.settings) as host:
            reason, message = await refused(host, "spawn_agent", agentId="hapless", task="try")
            assert (reason, "launch_failed" in message) == ("refused", True)
            assert why in message
            assert (await done(host, "list_agents"))["agents"] == []
            assert (await refused(host, "stop_agent", agentId="stranger"))[0] == "not_found"

    anyio.run(use)
    wait_until(lambda: not key_files(gateway.settings), what="the end of its key")
    with gateway.client() as operator:
        assert participants(operator) == []
        assert operator.get("/api/hub/participants/hapless").json().get("keys", []) == []


@pytest.mark.requirement("CM-04")
def test_of_spawns_of_one_name_one_wins_and_a_repeated_one_starts_no_second(
    start_gateway: Callable[..., McpGateway],
) -> None:
    first, second = start_gateway(spawn_image="test/idle"), start_gateway(spawn_image="test/idle")
    found: list[Any] = []

    async def one(host: Any, **arguments: Any) -> None:
        found.append(await host.call_tool("spawn_agent", arguments))

    async def use() -> None:
        async with management(first.settings) as a, management(second.settings) as b:
            async with anyio.create_task_group() as tasks:
                for host in (a, b, a, b):
                    tasks.start_soon(lambda host=host: one(host, agentId="twin", task="be alone"))
            assert sorted(answer.is_error for answer in found) == [False, True, True, True]
            for answer in found:
                if answer.is_error:
                    assert "takes part already" in answer.content[0].text
            same = {"task": "count", "idempotencyKey": "spawn-1"}
            names = {(await done(host, "spawn_agent", **same))["agentId"] for host in (a, b, a)}
            assert len(names) == 1
            assert (await refused(a, "spawn_agent", task="other", idempotencyKey="spawn-1"))[0] == "refused"
            # Without a key each call is a spawn of its own.
            assert len({(await done(a, "spawn_agent", task="count"))["agentId"] for _ in range(2)}) == 2

    anyio.run(use)
    with first.client() as operator:
        wait_until(lambda: len(participants(operator)) == 4, what="what was spawned")
        wait_until(lambda: len(_alive(first.settings)) == 4, what="a process for each")
        wait_until(lambda: len(key_files(first.settings)) == 4, what="a key for each, and no other")


def test_names_that_are_others_and_arguments_that_are_wrong_are_refused_with_the_reason(
    gateway: McpGateway, operator: httpx.Client
) -> None:
    operator.post("/api/hub/principals", json={"principal": "ann", "role": "worker"})

    async def use() -> None:
        async with management(gateway.settings) as host:
            for arguments, reason, why in (
                ({"agentId": "operator", "task": "x"}, "malformed", "reserved"),
                ({"agentId": "ann", "task": "x"}, "refused", "policy"),
                ({"agentId": "../x", "task": "x"}, "malformed", "agentId"),
                ({"task": ""}, "malformed", "task"),
                ({}, "malformed", "task"),
                ({"task": "x", "colour": "red"}, "malformed", "body"),
                ({"task": "x", "capabilities": "sum"}, "malformed", "capabilities"),
            ):
                found = await refused(host, "spawn_agent", **arguments)
                assert (found[0], why in found[1]) == (reason, True), found
            assert (await refused(host, "no_such_tool"))[0] == "not_found"

    anyio.run(use)
    assert participants(operator) == []
