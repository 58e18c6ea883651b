"""The load of `bench hub`: agents that send and drain messages over HTTP, all in one asyncio program.

Each agent has a client of its own that keeps its connections. All figures, ours and the peer's,
include the cost of the clients, because they share the machine with the server that they measure. The clients
use aiohttp, because it costs a quarter of what httpx costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.benchmarks.bench_report import quantile

MESSAGES = "/api/hub/messages"
DRAIN_LIMIT = 100
# How long a message may take to be there, before the run counts as failed.
WITHIN_S = 20.0
PAYLOAD = {"text": "step 7 of 12 done, reading the index", "data": {"step": 7, "model": "small"}}


class Agents:
    """The agents at one address. An async context manager."""

    def __init__(self, url: str, tokens: Mapping[str, str]) -> None:
        self.names = list(tokens)
        self._url = url
        self._tokens = tokens
        self._clients: dict[str, aiohttp.ClientSession] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for name, token in self._tokens.items():
            client = aiohttp.ClientSession(
                self._url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=aiohttp.ClientTimeout(WITHIN_S),
            )
            self._clients[name] = await self._open.enter_async_context(client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    def other(self, number: int, turn: int) -> str:
        """Somebody else than the agent with this number, another one each turn."""
        count = len(self.names)
        return self.names[(number + 1 + turn % (count - 1)) % count]

    async def send(self, sender: str, recipient: str) -> str:
        """Send a message; its id."""
        body = {"recipient": recipient, "type": "note", "payload": PAYLOAD}
        async with self._clients[sender].post(MESSAGES, json=body) as answer:
            return str((await _checked(answer))["message_id"])

    async def drain(self, name: str) -> list[str]:
        """The ids of the messages that one drain gives."""
        async with self._clients[name].get(MESSAGES, params={"limit": DRAIN_LIMIT}) as answer:
            return [message["id"] for message in (await _checked(answer))["messages"]]

    async def drain_all(self) -> int:
        """Empty all mailboxes; how many messages there were."""

        async def emptied(name: str) -> int:
            found = 0
            while taken := len(await self.drain(name)):
                found += taken
            return found

        return sum(await asyncio.gather(*map(emptied, self.names)))


async def _checked(answer: aiohttp.ClientResponse) -> Any:
    if answer.status != 200:
        said = (await answer.text())[:500]
        raise RuntimeError(f"{answer.method} {answer.url}: {answer.status} {said}")
    return await answer.json()


@dataclass(frozen=True)
class Roundtrips:
    """The duration of the counted roundtrips, and their rate."""

    p50_ms: float
    p99_ms: float
    per_s: float


async def roundtrips(url: str, tokens: Mapping[str, str], seconds: float) -> Roundtrips:
    """Each agent sends to its neighbour, who drains until it is there; all at once, after a warm-up."""
    took: list[float] = []
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

    async with Agents(url, tokens) as agents, asyncio.TaskGroup() as tasks:
        for number, name in enumerate(agents.names):
            tasks.create_task(one(name, agents.other(number, 0)))
    if not took:
        raise RuntimeError("no roundtrip ended in time")
    return Roundtrips(quantile(took, 0.5) * 1000, quantile(took, 0.99) * 1000, len(took) / seconds)


async def sends_per_s(url: str, tokens: Mapping[str, str], seconds: float) -> float:
    """All agents only send. Afterwards, uncounted, all is drained: as many messages as were answered for."""
    counted = answered = 0
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

    async with Agents(url, tokens) as agents:
        async with asyncio.TaskGroup() as tasks:
            for number, name in enumerate(agents.names):
                tasks.create_task(one(number, name))
        drained = await agents.drain_all()
    if drained != answered:
        raise RuntimeError(f"{answered} messages were answered for, {drained} were there")
    return counted / seconds


@dataclass(frozen=True)
class Visible:
    """How long after its answer a message was there at the other gateway, and the rate that was reached."""

    p50_ms: float
    p99_ms: float
    per_s: float


async def visible(first: str, second: str, tokens: Mapping[str, str], rate: int, seconds: float) -> Visible:
    """Send at one gateway at a steady rate, drain at the other: from the answer to the drain's that has it."""
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
    return Visible(quantile(ages, 0.5) * 1000, quantile(ages, 0.99) * 1000, per_s)
