"""Reports of progress for calls of the management server that take long (AM-14)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from mcp import Client

from connectors.doors.mcp_tools.agents.mcp_tool import reported_progress
from connectors.doors.mcp_tools.management import management_server
from connectors.doors.mcp_tools.management.management_server import ManagementMcp
from schemas.settings.settings import Settings
from trunkline_agent.errors import NotFound

pytestmark = pytest.mark.requirement("AM-14")


@asynccontextmanager
async def connected(server: ManagementMcp) -> AsyncIterator[tuple[Any, Any]]:
    """The two streams of a client of the server."""
    to_server, requests = anyio.create_memory_object_stream[Any](0)
    answers, from_server = anyio.create_memory_object_stream[Any](0)
    async with requests, anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, requests, answers)
        async with to_server, from_server:
            yield from_server, to_server


@pytest.mark.long
def test_a_long_call_reports_progress_to_a_host_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(asked: Any, call: str) -> dict[str, Any]:
        time.sleep(0.4)
        return {"agents": [], "left": 0}

    def failing(asked: Any, call: str) -> dict[str, Any]:
        time.sleep(0.2)
        raise NotFound("no agent of this name")

    monkeypatch.setattr(management_server, "reported_progress", partial(reported_progress, every_s=0.05))
    server = ManagementMcp(Settings())
    monkeypatch.setattr(server, "_tools", SimpleNamespace(list_agents=slow, stop_agent=failing))
    seen: list[float] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async def talk() -> None:
        async with Client(connected(server)) as client:
            found = await client.call_tool("list_agents", {}, progress_callback=note)
            assert found.structured_content == {"agents": [], "left": 0}
            assert len(seen) >= 2 and seen == sorted(set(seen))
            count = len(seen)
            # An error of the tool stays its own, and a host that asks for no progress gets none.
            refused = await client.call_tool("stop_agent", {"agentId": "x"}, progress_callback=note)
            assert refused.is_error and refused.structured_content["reason"] == "not_found"
            assert len(seen) > count
            count = len(seen)
            await client.call_tool("list_agents", {})
            assert len(seen) == count

    anyio.run(talk)
