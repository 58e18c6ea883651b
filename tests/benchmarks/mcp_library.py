"""The cost of a signed MCP call through the library, beside a client that was written by hand on aiohttp.

The library has two clients: `AsyncToolCalls`, for the calls of tools alone, and the official one of the package
`mcp` with our signature. The latter validates each message with pydantic and passes it through several tasks,
so it costs a multiple, which `official_cpu_ratio` shows without a limit. The processor times are of this
process, in turns (control, library, official, control, ...).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import orjson

from tests.agent_signatures import signed_headers
from tests.benchmarks.bench_report import teller
from tests.benchmarks.mcp_load import HEADERS, TEXT, WITHIN_S, request
from trunkline_agent.credentials import Credentials, McpAccess
from trunkline_agent.mcp import AsyncToolCalls, connect
from trunkline_agent.mcp.signing import load_private_key

TURNS = 3
AT_MOST = {"client_cpu_ratio": 1.3}

say = teller("mcp")

Keys = Mapping[str, tuple[bytes, str]]
Call = Callable[..., Awaitable[dict[str, Any]]]


async def by_hand(opened: AsyncExitStack, url: str, name: str, key: bytes) -> Call:
    """The control."""
    session = await opened.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WITHIN_S)))
    private = load_private_key(key)

    async def call(tool: str, **arguments: Any) -> dict[str, Any]:
        body = request("tools/call", {"name": tool, "arguments": arguments})
        headers = HEADERS | signed_headers(name, private, body)
        async with session.post(f"{url}/mcp", data=body, headers=headers) as answer:
            told = await answer.read()
        result = orjson.loads(told).get("result") if answer.status == 200 else None
        if result is None or result.get("isError"):
            raise RuntimeError(f"{answer.status} {told[:300]!r}")
        return dict(result["structuredContent"])

    return call


async def official(opened: AsyncExitStack, url: str, name: str, key: bytes) -> Call:
    """The official client with the library's signature."""
    credentials = Credentials(name, mcp=McpAccess(url, key.decode()))
    client = await opened.enter_async_context(connect(credentials))

    async def call(tool: str, **arguments: Any) -> dict[str, Any]:
        found = await client.call_tool(tool, arguments)
        if found.is_error or found.structured_content is None:
            raise RuntimeError(str(found)[:300])
        return dict(found.structured_content)

    return call


async def through_library(opened: AsyncExitStack, url: str, name: str, key: bytes) -> Call:
    """The library's calls of tools."""
    credentials = Credentials(name, mcp=McpAccess(url, key.decode()))
    tools = await opened.enter_async_context(AsyncToolCalls(credentials))

    async def call(tool: str, **arguments: Any) -> dict[str, Any]:
        return await tools.call(tool, arguments)

    return call


CLIENTS = {"control": by_hand, "library": through_library, "official": official}


async def call_cost_us(make: Any, url: str, keys: Keys, seconds: float) -> float:
    """Return the processor time of this process per call. All agents at once send and read in turns."""
    calls, names = 0, list(keys)

    async def one(number: int, call: Call, until: float) -> None:
        nonlocal calls
        to = names[(number + 1) % len(names)]
        for turn in itertools.count():
            if time.monotonic() >= until:
                return
            if turn % 2:
                await call("get_my_messages", unreadOnly=True, limit=5)
            else:
                await call("send_to_agent", targetAgentId=to, message=f"{TEXT} {time.time_ns()}")
            calls += 1

    async with AsyncExitStack() as opened:
        clients = [await make(opened, url, name, key) for name, (key, _) in keys.items()]
        await asyncio.gather(*(client("discover_agents") for client in clients))
        began, until = time.process_time(), time.monotonic() + seconds
        await asyncio.gather(*(one(number, client, until) for number, client in enumerate(clients)))
        return 1e6 * (time.process_time() - began) / calls


def client_cost(url: str, keys: Keys, seconds: float) -> dict[str, Any]:
    """Return the cost of a call by each client, and the ratios to the control."""
    costs = dict.fromkeys(CLIENTS, 0.0)
    for turn in range(1, TURNS + 1):
        for name, make in CLIENTS.items():
            found = asyncio.run(call_cost_us(make, url, keys, seconds))
            say(f"turn {turn}: {found:.0f} us a call, {name}")
            costs[name] += found / TURNS
    return {
        **{f"{name}_us_per_call": round(cost) for name, cost in costs.items()},
        "client_cpu_ratio": round(costs["library"] / costs["control"], 3),
        "official_cpu_ratio": round(costs["official"] / costs["control"], 3),
    }
