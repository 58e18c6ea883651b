"""The load of `bench hub`: agents that send and drain messages over HTTP, all in one asyncio program.

All figures, ours and the peer's, include the cost of the clients, because they share the machine with the
server that they measure. So the clients are lean: requests are bytes that were made before, and an answer costs
one callback of the protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final, Self

import orjson

from tests.benchmarks.bench_report import Figures, quantile
from tests.benchmarks.bench_stack import Server
from tests.benchmarks.lean_http import Connection, open_connection, request_bytes
from tests.benchmarks.process_times import Meter

MESSAGES: Final = "/api/hub/messages"
DRAIN_LIMIT: Final = 100
# How long a message may take to be there, before the run counts as failed.
WITHIN_S: Final = 20.0
PAYLOAD: Final = {"text": "step 7 of 12 done, reading the index", "data": {"step": 7, "model": "small"}}
# The headers of a usual client, which the server has to read.
_HEADERS: Final = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate", "User-Agent": "bench"}


class Agents:
    """The agents at a port of this machine. An async context manager.

    Each agent keeps as many connections as it has requests under way.
    """

    def __init__(self, port: int, tokens: Mapping[str, str]) -> None:
        self.names = list(tokens)
        self._port = port
        self._tokens = tokens
        self._opened: list[Connection] = []
        self._free: dict[str, list[Connection]] = {name: [] for name in tokens}
        path = f"{MESSAGES}?limit={DRAIN_LIMIT}"
        self._drains = {name: request_bytes("GET", path, self._headers(name)) for name in tokens}
        self._sends: dict[tuple[str, str], bytes] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._opened:
            connection.close()

    def _headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._tokens[name]}", **_HEADERS}

    def other(self, number: int, turn: int) -> str:
        """Return an agent other than the one with this number, another one each turn."""
        count = len(self.names)
        return self.names[(number + 1 + turn % (count - 1)) % count]

    async def _ask(self, name: str, request: bytes) -> Any:
        free = self._free[name]
        if free:
            connection = free.pop()
        else:
            connection = await open_connection(self._port)
            self._opened.append(connection)
        status, body = await connection.sent(request)
        free.append(connection)
        if status != 200:
            raise RuntimeError(f"{name} got {status} for {request[:60]!r}: {body[:500]!r}")
        return orjson.loads(body)

    async def send(self, sender: str, recipient: str) -> str:
        """Send a message; return its id."""
        request = self._sends.get((sender, recipient))
        if request is None:
            body = orjson.dumps({"recipient": recipient, "type": "note", "payload": PAYLOAD})
            headers = self._headers(sender) | {"Content-Type": "application/json"}
            request = self._sends[sender, recipient] = request_bytes("POST", MESSAGES, headers, body)
        return str((await self._ask(sender, request))["message_id"])

    async def drain(self, name: str) -> list[str]:
        """Return the ids of the messages that one drain gives."""
        return [message["id"] for message in (await self._ask(name, self._drains[name]))["messages"]]

    async def drain_all(self) -> int:
        """Empty all mailboxes; return how many messages there were."""

        async def emptied(name: str) -> int:
            found = 0
            while taken := len(await self.drain(name)):
                found += taken
            return found

        return sum(await asyncio.gather(*map(emptied, self.names)))


async def roundtrips(server: Server, tokens: Mapping[str, str], seconds: float) -> Figures:
    """Let each agent send to its neighbour, who drains until it is there; all at once, after a warm-up."""
    took: list[float] = []
    meter = Meter(server.pids)
    counted_from = time.monotonic() + seconds / 3
    until = counted_from + seconds

    async def one(sender: str, recipient: str) -> None:
        while (began := time.monotonic()) < until:
            message_id = await agents.send(sender, recipient)
            # Nobody else drains this mailbox, or fills it.
            while message_id not in await agents.drain(recipient):
                if time.monotonic() - began > WITHIN_S:
                    raise RuntimeError(f"a message was not there within {WITHIN_S:.0f} s")
            ended = time.monotonic()
            if counted_from <= began and ended <= until:
                took.append(ended - began)

    async with (
        asyncio.timeout(2 * seconds + WITHIN_S),
        Agents(server.port, tokens) as agents,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(meter.between(counted_from, until))
        for number, name in enumerate(agents.names):
            tasks.create_task(one(name, agents.other(number, 0)))
    if not took:
        raise RuntimeError("no roundtrip ended in time")
    return {
        "p50_ms": quantile(took, 0.5) * 1000,
        "p99_ms": quantile(took, 0.99) * 1000,
        "roundtrips_per_s": len(took) / seconds,
        "us_per_roundtrip": meter.us_per(len(took)),
    }


async def sends(server: Server, tokens: Mapping[str, str], seconds: float) -> Figures:
    """Let all agents only send. Afterwards, uncounted, drain all: as many messages as were answered for."""
    counted = answered = 0
    meter = Meter(server.pids)
    counted_from = time.monotonic() + seconds / 3
    until = counted_from + seconds

    async def one(number: int, sender: str) -> None:
        nonlocal counted, answered
        turn = 0
        while time.monotonic() < until:
            await agents.send(sender, agents.other(number, turn))
            answered += 1
            counted += counted_from <= time.monotonic() <= until
            turn += 1

    async with asyncio.timeout(3 * seconds + WITHIN_S), Agents(server.port, tokens) as agents:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(meter.between(counted_from, until))
            for number, name in enumerate(agents.names):
                tasks.create_task(one(number, name))
        drained = await agents.drain_all()
    if drained != answered:
        raise RuntimeError(f"{answered} messages were answered for, {drained} were there")
    return {"sends_per_s": counted / seconds, "us_per_op": meter.us_per(counted)}


async def visible(first: int, second: int, tokens: Mapping[str, str], rate: int, seconds: float) -> Figures:
    """Send at one gateway's port at a steady rate, and drain at another one's.

    The time is counted from the answer to the send until the drain that has the message.
    """
    seen: dict[str, float] = {}
    ages: list[float] = []
    warm = int(rate * seconds)  # the second gateway has just been started
    total = warm + int(rate * seconds)
    per_s = 0.0

    async def one(number: int) -> None:
        at = number % len(here.names)
        recipient = here.other(at, number // len(here.names))
        message_id = await here.send(here.names[at], recipient)
        answered = time.monotonic()
        # The drain of another message to the same recipient may get this one, even before its answer.
        while message_id not in seen:
            for found in await there.drain(recipient):
                seen[found] = time.monotonic()
            if time.monotonic() - answered > WITHIN_S:
                raise RuntimeError(f"a message was not visible within {WITHIN_S:.0f} s")
        if number >= warm:
            ages.append(max(0.0, seen[message_id] - answered))

    async with Agents(first, tokens) as here, Agents(second, tokens) as there, asyncio.TaskGroup() as tasks:
        began = time.monotonic()
        for number in range(total):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            tasks.create_task(one(number))
        per_s = total / (time.monotonic() - began)
    return {
        "visible_p50_ms": quantile(ages, 0.5) * 1000,
        "visible_p99_ms": quantile(ages, 0.99) * 1000,
        "visible_per_s": per_s,
    }
