"""The load of `bench mcp`: agents that call tools over MCP's streamable HTTP, all in one asyncio program.

Each agent has a client of its own that keeps its connection and makes one call at a time. All figures
include the cost of the clients and of signing each call, because the clients share the machine with the server.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from tests.agent_signatures import signed_headers
from tests.benchmarks.bench_report import quantile
from trunkline_agent.mcp.signing import load_private_key

EACH = 5
READ_LIMIT = 20
WITHIN_S = 60.0
TEXT = "step 7 of 12 done, reading the index; the next one needs what you have found"
HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
_numbers = itertools.count(1)


class CallFailed(RuntimeError):
    """The server says that it did not do what was asked."""


class Tools(Protocol):
    """The calls of one agent, at our server or at a peer."""

    async def send(self, recipient: str, text: str) -> None:
        """Write to somebody."""

    async def unread(self) -> list[Any]:
        """The ids of the newest or oldest messages, at most READ_LIMIT, with their contents in the answer."""

    async def mark(self, message_id: Any) -> None:
        """Mark one message as read."""

    async def discover(self) -> None:
        """List the other agents."""

    async def status(self, text: str) -> None:
        """Say what one is doing."""


async def posted(session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> Any:
    """The result of a JSON-RPC request. Raises CallFailed for any other answer."""
    async with session.post(url, data=body, headers=HEADERS | headers) as answer:
        told = await answer.read()
        if answer.status != 200:
            raise CallFailed(f"{answer.status} {told[:300]!r}")
        found = orjson.loads(told)
    result = found.get("result")
    if result is None or result.get("isError"):
        raise CallFailed(told[:500].decode())
    return result


def request(method: str, params: dict[str, Any]) -> bytes:
    """A JSON-RPC request."""
    return orjson.dumps({"jsonrpc": "2.0", "id": next(_numbers), "method": method, "params": params})


class SignedTools:
    """The tools of AM-04, signed: ours, and those of the peer with the same tools."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str, private_key: bytes) -> None:
        self._session = session
        self._url = url
        self._name = name
        self._key = load_private_key(private_key)

    async def _call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        body = request("tools/call", {"name": tool, "arguments": arguments})
        headers = signed_headers(self._name, self._key, body)
        return dict((await posted(self._session, self._url, body, headers))["structuredContent"])

    async def send(self, recipient: str, text: str) -> None:
        """As Tools."""
        await self._call("send_to_agent", targetAgentId=recipient, message=text)

    async def unread(self) -> list[Any]:
        """As Tools."""
        found = await self._call("get_my_messages", unreadOnly=True, limit=READ_LIMIT)
        return [message["id"] for message in found["messages"]]

    async def mark(self, message_id: Any) -> None:
        """As Tools."""
        await self._call("mark_read", messageIds=[message_id])

    async def discover(self) -> None:
        """As Tools."""
        await self._call("discover_agents")

    async def status(self, text: str) -> None:
        """As Tools: the three that there are, in turns."""
        await self._call("update_my_status", status=text)


@dataclass
class Measured:
    """The calls' durations in seconds, the number of calls of the second phase, and the failures of both."""

    took: list[float] = field(default_factory=list)
    mixed: int = 0
    failed: list[str] = field(default_factory=list)
    mixed_s: float = 0.0

    async def timed(self, call: Awaitable[Any], is_mixed: int = 0) -> Any:
        """The call's answer; None when it failed, which counts with the time that it took."""
        began = time.perf_counter()
        try:
            found = await call
        except (CallFailed, TimeoutError) as error:
            self.failed.append(str(error) or f"no answer within {WITHIN_S:.0f} s")
            found = None
        else:
            self.mixed += is_mixed
        self.took.append(time.perf_counter() - began)
        return found

    def quantile_ms(self, share: float) -> float:
        """One quantile of all calls."""
        return 1000 * quantile(self.took, share)


async def exchange(name: str, others: Sequence[str], tools: Tools, measured: Measured) -> None:
    """Write EACH messages to others, then read."""
    for number in range(EACH):
        await measured.timed(tools.send(others[number], f"{TEXT} {number}"))
    await measured.timed(tools.unread())


async def mix(others: Sequence[str], tools: Tools, measured: Measured, until: float) -> None:
    """Of ten calls four are sends, three reads, one or two marks, and one asks or says how things are."""
    waiting: list[Any] = []
    statuses = ("idle", "working", "blocked")
    for turn in itertools.count():
        if time.monotonic() >= until:
            return
        kind = turn % 10
        if kind in (0, 3, 5, 8):
            call = tools.send(others[turn % len(others)], f"{TEXT} {turn}")
        elif kind in (1, 4, 7):
            waiting = await measured.timed(tools.unread(), 1) or []
            continue
        elif kind in (2, 6) and waiting:
            call = tools.mark(waiting.pop())
        elif kind == 9 and turn % 20 == 9:
            call = tools.status(statuses[turn // 20 % 3])
        else:
            call = tools.discover()
        await measured.timed(call, 1)


async def load(
    names: Sequence[str], tools_of: Callable[[aiohttp.ClientSession, str], Tools], seconds: float
) -> Measured:
    """Both phases: all agents write EACH messages and read, then all do all for so long."""
    measured = Measured()
    timeout = aiohttp.ClientTimeout(WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        tools = {name: tools_of(session, name) for name in names}
        others = {name: [*names[place + 1 :], *names[:place]] for place, name in enumerate(names)}
        await asyncio.gather(*(one.discover() for one in tools.values()))  # the connections are not measured
        await asyncio.gather(*(exchange(name, others[name], tools[name], measured) for name in names))
        began = time.monotonic()
        await asyncio.gather(*(mix(others[name], tools[name], measured, began + seconds) for name in names))
        # A slow agent first finishes the call that it has begun.
        measured.mixed_s = time.monotonic() - began
    return measured
