"""The tools of the agent MCP door, called by the official client over both transports, on a real gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway

TOOLS = {
    "discover_agents",
    "send_to_agent",
    "broadcast_message",
    "get_my_messages",
    "mark_read",
    "update_my_status",
    "ask_agent",
    "wait_for_messages",
    "lease_messages",
    "ack_messages",
    "nack_message",
    "extend_lease",
    "subscribe",
    "unsubscribe",
    "publish_message",
    "list_topics",
    "upload_blob",
    "read_blob",
    "count_messages",
}


async def called(client: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return the answer of a tool, which must not be an error."""
    found = await client.call_tool(tool, arguments)
    assert not found.is_error, found.content
    return dict(found.structured_content)


@pytest.mark.requirement("AM-01")
@pytest.mark.requirement("AM-04")
@pytest.mark.parametrize("transport", ["http", "sse"])
def test_every_tool_works_for_the_official_client(
    gateway: McpGateway, operator: httpx.Client, tmp_path: Path, transport: str
) -> None:
    ann, bo = (Agent(name, tmp_path).joined(operator, task=f"is {name}") for name in ("ann", "bo"))

    async def talk() -> None:
        async with ann.client(gateway, transport) as a, bo.client(gateway, transport) as b:
            assert {tool.name for tool in (await a.list_tools()).tools} == TOOLS
            assert await called(b, "update_my_status", status="idle", capabilities=["count"]) == {
                "success": True
            }
            (found,) = (await called(a, "discover_agents", capability="count"))["agents"]
            assert (found["id"], found["status"], found["task"]) == ("bo", "idle", "is bo")
            sent = await called(a, "send_to_agent", targetAgentId="bo", message="count the stars ☃")
            (message,) = (await called(b, "get_my_messages", unreadOnly=True))["messages"]
            assert message == {
                "id": sent["messageId"],
                "from": "ann",
                "to": "bo",
                "content": "count the stars ☃",
                "timestamp": sent["timestamp"],
                "read": False,
                "priority": "normal",
            }
            marked = await called(b, "mark_read", messageIds=[message["id"], "nothing-of-mine"])
            assert marked == {"marked": 1, "unknown": ["nothing-of-mine"], "notMarked": []}
            assert (await called(b, "get_my_messages", unreadOnly=True))["messages"] == []
            (message,) = (await called(b, "get_my_messages"))["messages"]
            assert message["read"]
            assert (await called(b, "broadcast_message", message="seven"))["recipientCount"] == 2
            (message,) = (await called(a, "get_my_messages"))["messages"]
            assert (message["from"], message["content"]) == ("bo", "seven")
            assert (await called(a, "get_my_messages"))["statistics"]["byAgent"] == {"bo": 1}

    anyio.run(talk)
