"""The memory of long answers at the agent MCP door, which a call takes until its answer was sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import anyio
import httpx
import pytest

from connectors.doors.mcp_tools.agents.sse_sessions import _Answers
from connectors.hub.serving.shares import ByteBudget, Rooms
from tests.broker_processes import wait_until
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import called, ids, sent

pytestmark = [pytest.mark.requirement("LM-13"), pytest.mark.timeout(120)]


class _Stream:
    """A stream whose reader is slow."""

    def __init__(self) -> None:
        self.is_read = asyncio.Event()

    async def send(self, item: object) -> None:
        """Wait for the reader."""
        await self.is_read.wait()


def test_an_answer_at_sse_keeps_its_memory_until_it_is_sent() -> None:
    async def call() -> None:
        budget, kept = ByteBudget(100), set[Rooms]()
        budget.begin_request(kept)
        assert await budget.reserve("ann", 90, 0.01)
        stream = _Stream()
        sending = asyncio.create_task(_Answers(stream, "ann", Counter(), budget).send("the answer"))
        assert await budget.take("ann", 20, 0.01) is None
        stream.is_read.set()
        await sending
        assert (budget.used, kept) == (0, set())

    asyncio.run(call())


@pytest.mark.parametrize("transport", ["http", "sse"])
def test_no_memory_is_kept_after_long_answers(
    shared_gateway: McpGateway, new_agent: Callable[[str], Agent], transport: str
) -> None:
    ann = new_agent("ann")

    async def talk() -> None:
        async with ann.client(shared_gateway, transport) as client:
            expected = [await sent(client, ann.name, "x" * 300_000) for _ in range(3)]
            # The official client reads no longer event than 1 MiB.
            fitting = 3 if transport == "http" else 1
            shown = await called(client, "get_my_messages")
            assert (ids(shown), shown["more"]) == (expected[:fitting], 3 - fitting)
            lease = await called(client, "lease_messages", limit=2)
            taken = min(2, fitting)
            assert (ids(lease), lease["left"]) == (expected[:taken], 3 - taken)
            waited = await called(client, "wait_for_messages", timeoutSeconds=0)
            assert ids(waited) == expected[taken : taken + fitting]
            await called(client, "discover_agents")
            is_free = partial(wait_until, lambda: used(shared_gateway) == 0, what="all memory is given back")
            await anyio.to_thread.run_sync(is_free)

    anyio.run(talk)


def used(gateway: McpGateway) -> float:
    """Return the bytes that answers have taken, by the gateway's metrics."""
    text = httpx.get(f"{gateway.url}/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith("trunkline_answer_memory_bytes "))
    return float(line.split()[1])
