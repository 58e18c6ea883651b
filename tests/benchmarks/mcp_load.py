"""The load of `bench mcp`: agents that call tools over MCP's streamable HTTP, all in one asyncio program.

Each agent has a connection of its own and makes one call at a time. All calls of a phase are signed before its
clock starts, because an RSA signature costs the client as much as a call costs the server. The clients are lean
for the same reason: they share the machine with the server that they measure.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import orjson
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from tests.agent_signatures import signed_headers
from tests.benchmarks.bench_report import Figures, quantile
from tests.benchmarks.bench_stack import Server
from tests.benchmarks.lean_http import open_connection, request_bytes
from tests.benchmarks.process_times import Meter
from tests.broker_processes import LOOPBACK

READ_LIMIT: Final = 20
WITHIN_S: Final = 60.0
TEXT: Final = "step 7 of 12 done, reading the index; the next one needs what you have found"
HEADERS: Final = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
SEND, READ, MARK, DISCOVER, STATUS = KINDS = ("send", "read", "mark", "discover", "status")
# Of ten calls four are sends, three reads, two marks, and one asks or says how things are.
_NINE: Final = (SEND, READ, MARK, SEND, READ, SEND, MARK, READ, SEND)
MIX: Final = (*_NINE, DISCOVER, *_NINE, STATUS)
_STATUSES: Final = ("idle", "working", "blocked")
_numbers = itertools.count(1)


def request(method: str, params: dict[str, Any]) -> bytes:
    """Return a JSON-RPC request."""
    return orjson.dumps({"jsonrpc": "2.0", "id": next(_numbers), "method": method, "params": params})


def signed_call(
    name: str, key: RSAPrivateKey, tool: str, arguments: Mapping[str, Any], host: str = LOOPBACK
) -> bytes:
    """Return the HTTP request by which an agent calls a tool, signed now."""
    body = request("tools/call", {"name": tool, "arguments": arguments})
    return request_bytes("POST", "/mcp", HEADERS | signed_headers(name, key, body), body, host)


class Call(NamedTuple):
    """A signed call. `recipient` is that of a send."""

    kind: str
    recipient: str
    request: bytes


class Phase:
    """The calls of a phase: their durations in seconds by kind, the failures, and the time of all together."""

    def __init__(self) -> None:
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        self.failed: list[str] = []
        self.seconds = 0.0
        self.us: dict[str, float] = {}

    @property
    def all_took(self) -> list[float]:
        """The durations of all calls."""
        return list(itertools.chain.from_iterable(self.took.values()))

    def figures(self) -> Figures:
        """Return rate, quantiles and processor time of a call."""
        took = self.all_took
        return {
            "ops_per_s": (len(took) - len(self.failed)) / self.seconds,
            "p50_ms": 1000 * quantile(took, 0.5),
            "p99_ms": 1000 * quantile(took, 0.99),
            "us_per_op": self.us,
        }


class McpAgents:
    """The agents at one MCP server. They know which of their messages they can mark as read."""

    def __init__(self, server: Server, keys: Mapping[str, RSAPrivateKey]) -> None:
        self._server, self._keys = server, keys
        self._names = list(keys)
        self._unread: dict[str, deque[str]] = {name: deque() for name in keys}

    def run(self, each: int, kind_of: Callable[[int], str]) -> Phase:
        """Sign `each` calls of each agent, then let all agents make them at once. `kind_of` gets a number."""
        calls = {
            name: [self._signed(place, kind_of(turn), turn) for turn in range(each)]
            for place, name in enumerate(self._names)
        }
        return asyncio.run(self._made(calls))

    def _signed(self, place: int, kind: str, turn: int) -> Call:
        name, recipient = self._names[place], ""
        if kind == MARK and not self._unread[name]:
            kind = DISCOVER
        tool, arguments = "discover_agents", dict[str, Any]()
        if kind == SEND:
            recipient = self._names[(place + 1 + turn % (len(self._names) - 1)) % len(self._names)]
            tool, arguments = "send_to_agent", {"targetAgentId": recipient, "message": f"{TEXT} {turn}"}
        elif kind == READ:
            tool, arguments = "get_my_messages", {"unreadOnly": True, "limit": READ_LIMIT}
        elif kind == MARK:
            tool, arguments = "mark_read", {"messageIds": [self._unread[name].popleft()]}
        elif kind == STATUS:
            tool, arguments = "update_my_status", {"status": _STATUSES[turn % len(_STATUSES)]}
        # The server of the package `mcp` refuses a host without its port.
        host = f"{LOOPBACK}:{self._server.port}"
        return Call(kind, recipient, signed_call(name, self._keys[name], tool, arguments, host))

    async def _made(self, calls: Mapping[str, list[Call]]) -> Phase:
        phase, meter = Phase(), Meter(self._server.pids)
        connections = {name: await open_connection(self._server.port) for name in calls}

        async def agent(name: str) -> None:
            for kind, recipient, raw in calls[name]:
                began = time.perf_counter()
                status, body = await connections[name].sent(raw)
                phase.took[kind].append(time.perf_counter() - began)
                result = orjson.loads(body).get("result") if status == 200 else None
                if result is None or result.get("isError"):
                    phase.failed.append(f"{kind}: {status} {body[:300]!r}")
                elif kind == SEND:
                    self._unread[recipient].append(result["structuredContent"]["messageId"])

        meter.begin()
        began = time.monotonic()
        async with asyncio.timeout(10 * WITHIN_S):
            await asyncio.gather(*map(agent, calls))
        phase.seconds = time.monotonic() - began
        meter.end()
        phase.us = meter.us_per(len(phase.all_took))
        for connection in connections.values():
            connection.close()
        return phase


def one_round(agents: McpAgents, count: int, seconds: float) -> Figures:
    """Measure one round: each kind alone, then all of them mixed, for about `seconds`.

    `count` is the number of agents. As many calls are signed before as the rates of the single kinds promise.
    """
    # The connections and the first calls are not measured, but their rate is.
    rate = agents.run(6, lambda turn: READ if turn == 5 else SEND).figures()["ops_per_s"]
    each = max(6, int(rate * seconds / 5 / count))
    # Twice as many sends: the mixed calls mark messages, too.
    kinds = {
        kind: agents.run(2 * each if kind == SEND else each, lambda _, kind=kind: kind)  # type: ignore[misc]
        for kind in KINDS
    }
    by_kind = {kind: phase.figures() for kind, phase in kinds.items()}
    mean_s = sum(1 / max(1.0, by_kind[kind]["ops_per_s"]) for kind in MIX) / len(MIX)
    mixed = agents.run(max(len(MIX), int(seconds / mean_s / count)), lambda turn: MIX[turn % len(MIX)])
    failed = [failure for phase in (*kinds.values(), mixed) for failure in phase.failed]
    for failure in dict.fromkeys(failed[:5]):
        print(f"mcp: one of {len(failed)} failed calls: {failure}", file=sys.stderr)
    return {**mixed.figures(), "failed_calls": len(failed), "kinds": by_kind}
