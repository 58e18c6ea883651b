"""The cost of a client of the hub through the library, beside that of a control that was written on aiohttp.

Both clients send the same requests in the same process, in turns (control, library, control, library), so that
what else the machine does meets both. Their cost is the processor time of this process per request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol, Self

import aiohttp

from tests.benchmarks.bench_report import teller
from tests.benchmarks.hub_load import DRAIN_LIMIT, MESSAGES, PAYLOAD, WITHIN_S
from trunkline_agent import AsyncAgent, Credentials
from trunkline_agent.credentials import HubAccess

TURNS = 3
AT_MOST = {"client_cpu_ratio": 1.3}

say = teller("hub")


class HttpAgents:
    """The control: the agents at one address, each with a client of aiohttp. An async context manager."""

    def __init__(self, url: str, tokens: Mapping[str, str]) -> None:
        self._url, self._tokens = url, tokens
        self._clients: dict[str, aiohttp.ClientSession] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for name, token in self._tokens.items():
            headers = {"Authorization": f"Bearer {token}"}
            client = aiohttp.ClientSession(
                self._url, headers=headers, timeout=aiohttp.ClientTimeout(WITHIN_S), raise_for_status=True
            )
            self._clients[name] = await self._open.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def send(self, sender: str, recipient: str) -> str:
        """Send a message; return its id."""
        body = {"recipient": recipient, "type": "note", "payload": PAYLOAD}
        async with self._clients[sender].post(MESSAGES, json=body) as answer:
            return str((await answer.json())["message_id"])

    async def drain(self, name: str) -> list[str]:
        """Return the ids of the messages that one drain gives."""
        async with self._clients[name].get(MESSAGES, params={"limit": DRAIN_LIMIT}) as answer:
            return [message["id"] for message in (await answer.json())["messages"]]


class LibraryAgents:
    """The agents at one address, each an `AsyncAgent`. An async context manager, used as `HttpAgents`."""

    def __init__(self, url: str, tokens: Mapping[str, str]) -> None:
        self._agents = {
            name: AsyncAgent(name, Credentials(name, hub=HubAccess(url, token)))
            for name, token in tokens.items()
        }
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for agent in self._agents.values():
            await self._open.enter_async_context(agent)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def send(self, sender: str, recipient: str) -> str:
        """Send a message; return its id."""
        return str((await self._agents[sender].send(recipient, "note", PAYLOAD)).message_id)

    async def drain(self, name: str) -> list[str]:
        """Return the id of the message that one drain gives, if there is one."""
        message = await self._agents[name].receive(lease_s=None, wait_s=0)
        return [] if message is None else [message.id]


class Client(Protocol):
    """A client whose cost is measured."""

    async def send(self, sender: str, recipient: str) -> str:
        """Send a message; its id."""

    async def drain(self, name: str) -> list[str]:
        """The ids of the messages that one drain gives."""


Clients = Callable[[str, Mapping[str, str]], Any]


async def request_cost_us(make: Clients, url: str, tokens: Mapping[str, str], seconds: float) -> float:
    """Return the processor time of this process per request, in microseconds.

    Each agent sends a message to its neighbour, who drains until it has come; all at once. The first roundtrip,
    which opens the connections, is not counted.
    """
    requests = 0
    names = list(tokens)

    async def trip(client: Client, number: int) -> None:
        nonlocal requests
        sender, recipient = names[number], names[(number + 1) % len(names)]
        message_id, began = await client.send(sender, recipient), time.monotonic()
        requests += 2
        while message_id not in await client.drain(recipient):
            requests += 1
            if time.monotonic() - began > WITHIN_S:
                raise RuntimeError(f"a message was not there within {WITHIN_S:.0f} s")

    async def trips(client: Client, number: int, until: float) -> None:
        while time.monotonic() < until:
            await trip(client, number)

    async with make(url, tokens) as client:
        await asyncio.gather(*(trip(client, number) for number in range(len(names))))
        requests, began = 0, time.process_time()
        until = time.monotonic() + seconds
        await asyncio.gather(*(trips(client, number, until) for number in range(len(names))))
        return 1e6 * (time.process_time() - began) / requests


def client_cost(url: str, tokens: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Return the cost of a request through the library and by the control, and the ratio of both."""
    control, library = 0.0, 0.0
    for turn in range(1, TURNS + 1):
        one = asyncio.run(request_cost_us(HttpAgents, url, tokens, seconds))
        other = asyncio.run(request_cost_us(LibraryAgents, url, tokens, seconds))
        say(f"turn {turn}: {one:.0f} us a request by aiohttp, {other:.0f} us through the library")
        control, library = control + one, library + other
    return {
        "control_us_per_request": round(control / TURNS),
        "library_us_per_request": round(library / TURNS),
        "client_cpu_ratio": round(library / control, 3),
    }
