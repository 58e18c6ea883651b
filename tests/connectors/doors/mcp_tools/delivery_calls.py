"""Calls of the tools that wait, lease and ask, and the number of waits at a gateway."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from mcp import Client

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.test_gateway_metrics import samples
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body

WAIT_S = 20


async def called(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return the answer of a tool, which must not be an error."""
    found = await client.call_tool(tool, arguments)
    assert not found.is_error, found.content
    return dict(found.structured_content or {})


async def sent(client: Client, recipient: str, text: str, **fields: Any) -> str:
    """Send a message; its id."""
    arguments = {"targetAgentId": recipient, "message": text, **fields}
    return str((await called(client, "send_to_agent", **arguments))["messageId"])


def ids(answer: dict[str, Any]) -> list[str]:
    """The ids of an answer's messages, in their order."""
    return [message["id"] for message in answer["messages"]]


def waits_at(gateway: McpGateway) -> int:
    """The number of requests that wait for a message at a gateway."""
    with gateway.client() as operator:
        return int(samples(operator)[("trunkline_mailbox_waits",)])


def wait_for_waits(gateway: McpGateway, count: int) -> float:
    """Wait until so many requests wait at a gateway; for how many seconds others are known to have waited.

    On a busy machine each answer takes its time. That is not the time of the waits, so the last answer counts
    from when it was asked for.
    """
    began = known = time.monotonic()

    def are_there() -> bool:
        nonlocal known
        asked = time.monotonic()
        if waits_at(gateway) == count:
            return True
        known = asked
        return False

    wait_until(are_there, what=f"{count} waits")
    return known - began


async def waiting(gateway: McpGateway, count: int = 1) -> float:
    """As `wait_for_waits`, in an event loop."""
    return await anyio.to_thread.run_sync(wait_for_waits, gateway, count)


def known_at(gateway: McpGateway, *agents: Agent) -> None:
    """Wait until a gateway knows these agents."""
    for agent in agents:
        with SignedCaller(agent, gateway) as caller:
            wait_until(
                lambda caller=caller: caller.post(call_body("discover_agents")).status_code == 200,
                what=f"{agent.name} is known",
            )


async def at_once(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """The results of several calls that run at the same time."""
    results: list[Any] = [None] * len(calls)

    async def run(number: int) -> None:
        results[number] = await calls[number]()

    async with anyio.create_task_group() as tasks:
        for number in range(len(calls)):
            tasks.start_soon(run, number)
    return results
