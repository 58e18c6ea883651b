"""The load of `bench wake`: agents that wait for messages at two doors, and senders that write to them.

All of them are in one asyncio program, so one clock measures the time from the send of a request to the moment
when its receiver has the message. A client whose connection ends goes on at the other door: a sender with the
same idempotency key, an agent over HTTP with the same request id.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import orjson
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from tests.benchmarks.bench_report import Figures, quantile
from tests.benchmarks.lean_http import Broken, Connection, open_connection, request_bytes
from tests.benchmarks.mcp_load import signed_call
from tests.benchmarks.process_times import Meter, process_s

WAIT_S: Final = 30
# An answer that ends a wait may be a little earlier by the clock of the client than by that of the server.
_EARLY_S: Final = 0.05
_MESSAGES: Final = "/api/hub/messages"
_TEXT: Final = "step 7 of 12 done, reading the index; the next one needs what you have found"
_WITHIN_S: Final = 20.0
# Pause of a client that no door accepts, so that it does not spin.
_PAUSE_S: Final = 0.02
_TRIES: Final = 50
# Of each sender. More at once than a principal may have would measure the refusals.
_CONNECTIONS: Final = 16


@dataclass(frozen=True)
class Door:
    """One gateway, or one front of the peer: its ports, its process, and its name in the figures."""

    name: str
    http_port: int
    mcp_port: int
    pid: int


@dataclass(frozen=True)
class Clients:
    """The tokens of agents and of senders by name, and the keys of the agents that wait over MCP."""

    http: Mapping[str, str]
    mcp: Mapping[str, RSAPrivateKey]
    senders: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """How long the parts of a round take, in seconds, and how many messages are sent per second.

    `kills`: whether the second door is killed in the middle of the sends.
    """

    rate: int
    seconds: float
    idle_s: float
    kills: bool = True
    ramp_s: float = 5.0
    warm_s: float = 5.0
    grace_s: float = 15.0


@dataclass
class Log:
    """A log of a round: times by number of the message, on the clock of `time.monotonic`."""

    sent: dict[int, float] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)
    in_hand: dict[int, float] = field(default_factory=dict)
    empty: int = 0
    ended: int = 0
    faults: list[str] = field(default_factory=list)

    def received(self, numbers: Sequence[int]) -> None:
        """Note that an agent has these messages in hand now."""
        now = time.monotonic()
        for number in numbers:
            self.in_hand.setdefault(number, now)

    def missed(self) -> int:
        """Return how many acknowledged messages nobody has in hand."""
        return len(self.acknowledged - self.in_hand.keys())


class Client:
    """A client of two doors. It keeps one connection, and changes to the other door when it ends."""

    def __init__(self, ports: Sequence[int], first: int) -> None:
        self._ports = ports
        self._at = first
        self._connection: Connection | None = None

    async def ask(self, request: Callable[[], bytes], within_s: float) -> tuple[int, bytes]:
        """Send a request and return status and body, at whichever door answers.

        `request` is called for each attempt. Raises Broken if no door answers in many attempts.
        """
        for attempt in range(_TRIES):
            try:
                if self._connection is None or not self._connection.is_open:
                    self._connection = await open_connection(self._ports[self._at])
                return await self._connection.ask(request(), within_s)
            except Broken:
                self._connection = None
                self._at = 1 - self._at
                if attempt:
                    await asyncio.sleep(_PAUSE_S)
        raise Broken("no door answers")

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()


async def _until_cancelled(client: Client, waiting: Coroutine[Any, Any, None]) -> None:
    try:
        await waiting
    finally:
        client.close()


async def wait_over_http(client: Client, token: str, log: Log) -> None:
    """Wait for messages and take them, until this is cancelled."""
    headers = {"Authorization": f"Bearer {token}"}
    path = f"{_MESSAGES}?wait={WAIT_S}"
    while True:
        request = request_bytes("GET", path, headers | {"X-Request-ID": str(uuid.uuid4())})
        began = time.monotonic()
        status, body = await client.ask(partial(bytes, request), WAIT_S + _WITHIN_S)
        if status != 200:
            log.faults.append(f"GET: {status} {body[:200]!r}")
            await asyncio.sleep(_PAUSE_S)
            continue
        found = orjson.loads(body)["messages"]
        log.received([message["payload"]["number"] for message in found])
        log.ended += 1
        log.empty += not found and time.monotonic() - began < WAIT_S - _EARLY_S


class McpAgent:
    """An agent that calls tools over MCP's streamable HTTP, and signs each call."""

    def __init__(self, client: Client, name: str, key: RSAPrivateKey, log: Log) -> None:
        self._client, self._name, self._key, self._log = client, name, key, log

    async def wait(self) -> None:
        """Wait for messages and mark them as read, until this is cancelled."""
        while True:
            began = time.monotonic()
            found = await self._call("wait_for_messages", timeoutSeconds=WAIT_S)
            if found is None:
                continue
            messages = found["messages"]
            self._log.received([orjson.loads(message["content"])["number"] for message in messages])
            self._log.ended += 1
            if messages:
                await self._call("mark_read", messageIds=[message["id"] for message in messages])
            else:
                self._log.empty += time.monotonic() - began < WAIT_S - _EARLY_S

    async def _call(self, tool: str, **arguments: Any) -> dict[str, Any] | None:
        """Return the result of a tool; None for an error, which is noted."""

        def signed() -> bytes:
            return signed_call(self._name, self._key, tool, arguments)

        status, told = await self._client.ask(signed, WAIT_S + _WITHIN_S)
        result = orjson.loads(told).get("result") if status == 200 else None
        if result is None or result.get("isError"):
            self._log.faults.append(f"{tool}: {status} {told[:200]!r}")
            await asyncio.sleep(_PAUSE_S)
            return None
        return dict(result["structuredContent"])


class Senders:
    """Senders with a few connections each, which are kept. A send waits until its sender has a free one.

    The time of a message begins when it is due, so that a server that is late is measured and not spared.
    """

    def __init__(self, tokens: Mapping[str, str], ports: Sequence[int], log: Log) -> None:
        self._log = log
        self._tokens = list(tokens.values())
        self._free: list[asyncio.Queue[Client]] = [asyncio.Queue() for _ in self._tokens]
        for free, number in itertools.product(self._free, range(_CONNECTIONS)):
            free.put_nowait(Client(ports, number % 2))

    async def send(self, number: int, recipient: str) -> None:
        """Send one message, and note when it was due and whether it was acknowledged."""
        self._log.sent[number] = time.monotonic()
        place = number % len(self._tokens)
        body = orjson.dumps(
            {"recipient": recipient, "type": "note", "payload": {"number": number, "text": _TEXT}}
        )
        headers = {
            "Authorization": f"Bearer {self._tokens[place]}",
            "Content-Type": "application/json",
            "Idempotency-Key": str(uuid.uuid4()),
        }
        request = request_bytes("POST", _MESSAGES, headers, body)
        client = await self._free[place].get()
        try:
            status, told = await client.ask(partial(bytes, request), _WITHIN_S)
        except Broken as error:
            status, told = 0, str(error).encode()
        self._free[place].put_nowait(client)
        if status == 200:
            self._log.acknowledged.add(number)
        else:
            self._log.faults.append(f"POST: {status} {told[:200]!r}")

    def close(self) -> None:
        """End all connections."""
        for free in self._free:
            while not free.empty():
                free.get_nowait().close()


async def idle_cores(doors: Sequence[Door], seconds: float) -> float:
    """Return the cores that the busier door uses during the next `seconds`, on average."""
    before = [process_s(door.pid) for door in doors]
    await asyncio.sleep(seconds)
    used = [process_s(door.pid) - earlier for door, earlier in zip(doors, before, strict=True)]
    return max(used) / max(seconds, 1e-9)


async def _agents_begin(
    doors: Sequence[Door], clients: Clients, log: Log, ramp_s: float
) -> list[asyncio.Task[None]]:
    """Let all agents wait, half of them at each door, and return their tasks. It takes `ramp_s` seconds."""
    http, mcp = [door.http_port for door in doors], [door.mcp_port for door in doors]
    tasks: list[asyncio.Task[None]] = []

    async def begin(client: Client, waiting: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(_until_cancelled(client, waiting)))
        await asyncio.sleep(ramp_s / (len(clients.http) + len(clients.mcp)))

    for token in clients.http.values():
        client = Client(http, len(tasks) % 2)
        await begin(client, wait_over_http(client, token, log))
    for name, key in clients.mcp.items():
        client = Client(mcp, len(tasks) % 2)
        await begin(client, McpAgent(client, name, key, log).wait())
    return tasks


def _latencies(log: Log, first: int) -> list[float]:
    """Return the seconds from send to receipt of the messages from number `first` on."""
    found = [log.in_hand[n] - log.sent[n] for n in log.acknowledged & log.in_hand.keys() if n >= first]
    if not found:
        raise RuntimeError(f"no message has arrived; the first fault: {log.faults[:1]}")
    return found


async def _send_all(
    doors: Sequence[Door], clients: Clients, plan: Plan, log: Log, meter: Meter, kill: Callable[[], None]
) -> Figures:
    """Send at the plan's rate, and kill the second door on the way. `meter` measures what was before the kill.

    Sends that begin in the first `plan.warm_s` seconds count for `missed` alone.
    """
    chance, names = random.Random(27), [*clients.http, *clients.mcp]
    senders = Senders(clients.senders, [door.http_port for door in doors], log)
    warm = int(plan.rate * plan.warm_s)
    total = warm + int(plan.rate * plan.seconds)
    end = warm + (total - warm) // 2 if plan.kills else total
    began, own_s, door_s = time.monotonic(), time.process_time(), process_s(doors[0].pid)
    async with asyncio.TaskGroup() as sends:
        for number in range(total):
            await asyncio.sleep(max(0.0, began + number / plan.rate - time.monotonic()))
            if number == warm:
                meter.begin()
            if number == end:
                meter.end()
                kill()
            sends.create_task(senders.send(number, chance.choice(names)))
        if not plan.kills:
            meter.end()
    took_s = time.monotonic() - began
    busy, load = process_s(doors[0].pid) - door_s, time.process_time() - own_s
    until = time.monotonic() + plan.grace_s
    while log.missed() and time.monotonic() < until:
        await asyncio.sleep(0.1)
    senders.close()
    took = _latencies(log, warm)
    return {
        "p50_ms": 1000 * quantile(took, 0.5),
        "p99_ms": 1000 * quantile(took, 0.99),
        "busy_cores": busy / took_s,
        "load_cores": load / took_s,
        "sends_per_s": total / took_s,
        "us_per_op": meter.us_per(end - warm),
    }


async def one_round(
    doors: Sequence[Door], broker: Mapping[str, int], clients: Clients, plan: Plan, kill: Callable[[], None]
) -> Figures:
    """Let the agents wait, measure the doors while nothing is sent, then send; kill the second door on the way.

    `broker` is the process id of the broker behind the doors, by its name.
    """
    log = Log()
    agents = await _agents_begin(doors, clients, log, plan.ramp_s)
    idle = await idle_cores(doors, plan.idle_s)
    meter = Meter({**{door.name: door.pid for door in doors}, **broker})
    found = await _send_all(doors, clients, plan, log, meter, kill)
    for task in agents:
        task.cancel()
    ended = await asyncio.gather(*agents, return_exceptions=True)
    log.faults += [repr(one) for one in ended if isinstance(one, Exception)]
    if log.faults:
        print(f"wake: {len(log.faults)} requests failed, the first one with {log.faults[0]}", file=sys.stderr)
    counts = {"empty_answers": log.empty, "missed": log.missed(), "failed": len(log.faults)}
    return {**found, **counts, **({"idle_cores": idle} if plan.idle_s else {})}
