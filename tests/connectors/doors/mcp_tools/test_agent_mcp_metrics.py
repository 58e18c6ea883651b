"""The metrics of agents that speak MCP (HH-13 for this door)."""

from __future__ import annotations

import anyio
import httpx
import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.test_gateway_metrics import samples
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway


@pytest.mark.requirement("HH-13")
def test_calls_requests_agents_and_readers_are_counted(
    gateway: McpGateway, operator: httpx.Client, tmp_path
) -> None:
    ann = Agent("ann", tmp_path).joined(operator)

    async def work() -> None:
        async with ann.client(gateway) as client:
            await client.call_tool("update_my_status", {"status": "working"})
            await client.call_tool("send_to_agent", {"targetAgentId": "nobody", "message": "x"})
            await client.call_tool("canary_tool", {})
        async with ann.client(gateway, "sse") as client:
            await client.call_tool("get_my_messages", {})
            assert samples(operator)["trunkline_event_readers", "mcp"] == 1

    anyio.run(work)
    assert httpx.get(f"{gateway.mcp_url}/canary", trust_env=False).status_code == 403
    wait_until(lambda: samples(operator)["trunkline_event_readers", "mcp"] == 0, 10, "the reader has gone")
    found = samples(operator)
    assert found["trunkline_mcp_calls_total", "ok", "update_my_status"] == 1
    assert found["trunkline_mcp_calls_total", "send_to_agent", "unknown_recipient"] == 1
    assert found["trunkline_agents", "working"] == 1
    assert found["trunkline_http_requests_total", "/mcp", "200", "POST"] >= 3
    assert found["trunkline_http_requests_total", "403", "GET", "no route"] == 1
    assert "canary" not in operator.get("/metrics").text
