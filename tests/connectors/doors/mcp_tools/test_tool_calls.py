"""Calls of tools by the library without the official client: at a real door, with their errors and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.broker_processes import LOOPBACK, free_port
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from trunkline_agent.credentials import Credentials, McpAccess
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError, UsageError
from trunkline_agent.mcp import AsyncToolCalls

NewAgent = Callable[[str], Agent]
Outcome = dict[str, Any] | TrunklineError


def credentials_of(agent: Agent, url: str, key_of: Agent | None = None) -> Credentials:
    """The credentials of an agent at a door, or with the key of another one."""
    return Credentials(agent.name, mcp=McpAccess(url, (key_of or agent).key_path.read_text()))


def called(
    credentials: Credentials, *calls: tuple[str, dict[str, Any]]
) -> list[dict[str, Any] | TrunklineError]:
    """Return the result of each call, or its error."""

    async def run() -> list[Outcome]:
        found: list[Outcome] = []
        async with AsyncToolCalls(credentials) as tools:
            for tool, arguments in calls:
                try:
                    found.append(await tools.call(tool, arguments))
                except TrunklineError as error:
                    found.append(error)
        return found

    return asyncio.run(run())


@pytest.mark.kafka
@pytest.mark.requirement("AG-73")
def test_calls_without_the_official_client_are_signed_answered_and_refused_by_name(
    shared_gateway: McpGateway, new_agent: NewAgent
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")
    # The same call again is another one: its nonce differs, so the second one is no replay.
    send = ("send_to_agent", {"targetAgentId": bo.name, "message": "hi"})
    first, second, unknown, wrong, missing = called(
        credentials_of(ann, shared_gateway.mcp_url),
        send,
        send,
        ("send_to_agent", {"targetAgentId": "nobody-of-this-name", "message": "hi"}),
        ("send_to_agent", {"message": 7}),
        ("no_such_tool", {}),
    )
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first["messageId"] != second["messageId"]
    assert isinstance(unknown, Refused) and unknown.reason == "unknown_recipient"
    assert isinstance(wrong, UsageError)
    assert isinstance(missing, TrunklineError)
    took, lease = called(
        credentials_of(bo, f"{shared_gateway.mcp_url}/mcp"),
        ("get_my_messages", {"unreadOnly": True}),
        ("lease_messages", {"leaseSeconds": 5, "timeoutSeconds": 0.2, "limit": 1}),
    )
    assert isinstance(took, dict) and isinstance(lease, dict)
    assert {one["id"] for one in took["messages"]} == {first["messageId"], second["messageId"]}
    assert len(lease["messages"]) == 1
    (forged,) = called(credentials_of(ann, shared_gateway.mcp_url, key_of=bo), send)
    assert isinstance(forged, Refused)
    (away,) = called(credentials_of(ann, f"http://{LOOPBACK}:{free_port()}"), send)
    assert isinstance(away, BackboneUnreachable)
