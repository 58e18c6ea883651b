"""Measure the cost of a message to a topic, and how soon it is everywhere, next to a loop of sends.

1,000 subscribers and two gateways, with Kafka alone beside them. In turns: a message a second is published to
the topic, and then as many times a message is sent to each subscriber by `POST /api/hub/messages`, 30 requests
at once. `topic_cpu_s` and `sends_cpu_s` are the processor time of both gateways for the same number of
messages in the mailboxes, and `cpu_ratio` is the first divided by the second.

The time of a message runs from the publishing request until the last of its copies is in its mailbox: by the
mailboxes' own times, and by a reader that waits for messages as the subscriber to which the last copy goes. In
the end all mailboxes are read, and each must have each message once. Otherwise, and if a limit was not held
(`not_held`), the exit code is 1.

    ./trunkline bench topics --json
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from connectors.programs.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import AgentMcpSettings, DashboardSettings, Settings
from tests.benchmarks.bench_report import Bench, quantile, teller
from tests.benchmarks.bench_stack import CheckoutStack, operator_client
from tests.benchmarks.process_times import process_s
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.own_settings import stack_settings
from trunkline_agent import AsyncAgent, Credentials, HubAccess
from trunkline_agent.hub.hub_requests import get_json, path_of
from trunkline_agent.hub.plans import Retries

SUBSCRIBERS, AT_ONCE = 1000, 30
AT_MOST = {"cpu_ratio": 0.5}
TOPIC = "news"
# How long a copy may take to be there, before it counts as missing.
WITHIN_S = 30.0
# The other gateway and the reactor's last records come a moment after the reader's message.
REST_S = 1.0
_PAYLOAD = {"text": "step 7 of 12 done, reading the index", "data": {"step": 7, "model": "small"}}

say = teller("topics")


@dataclass
class Measured:
    """The figures of all rounds: when each message was published, when its reader had it, and what it cost."""

    published_at: dict[str, float] = field(default_factory=dict)
    read_at: dict[str, float] = field(default_factory=dict)
    topic_cpu_s: float = 0.0
    sends_cpu_s: float = 0.0


class Load:
    """The operator, who publishes and sends, and a reader of one mailbox. An async context manager.

    Args:
        url: The address of the gateway.
        token: The operator's token.
        reader_token: The token of the subscriber that reads.
        names: The names of all subscribers.
    """

    def __init__(self, url: str, token: str, reader_token: str, names: Sequence[str]) -> None:
        self._names = names
        self._operator = AsyncAgent("operator", Credentials("operator", hub=HubAccess(url, token)))
        reader = names[-1]
        self._reader = AsyncAgent(reader, Credentials(reader, hub=HubAccess(url, reader_token)))

    async def __aenter__(self) -> Load:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._operator.close()
        await self._reader.close()

    async def publish(self) -> tuple[str, float]:
        """Publish a message; return its id, and the moment before the request in seconds since 1970."""
        began = time.time()
        found = await self._operator.publish(TOPIC, "note", _PAYLOAD)
        if found.recipients != len(self._names):
            raise RuntimeError(f"{found.recipients} recipients instead of {len(self._names)}")
        return str(found.message_id), began

    async def publish_steadily(self, count: int) -> dict[str, float]:
        """Publish a message a second; return the ids with the moments before the requests."""
        found, began = {}, time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number - time.monotonic()))
            message_id, moment = await self.publish()
            found[message_id] = moment
        return found

    async def read(self, count: int) -> list[float]:
        """Take `count` messages of topics as they come; return the moments at which they were in hand."""
        found: list[float] = []
        deadline = time.monotonic() + count + WITHIN_S
        while len(found) < count and time.monotonic() < deadline:
            message = await self._reader.receive(lease_s=None, wait_s=5)
            if message is not None and message.topic:
                found.append(time.time())
        return found

    async def send_to_each(self) -> None:
        """Send a message to each subscriber, some at once."""
        left = list(self._names)

        async def some() -> None:
            while left:
                await self._operator.send(left.pop(), "note", _PAYLOAD)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    async def send_steadily(self, count: int) -> None:
        """Send to each subscriber so many times, at most once a second."""
        began = time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number - time.monotonic()))
            await self.send_to_each()

    async def mailbox(self, name: str) -> list[dict[str, Any]]:
        """The messages of topics in a mailbox, whatever their state."""
        plan = get_json(path_of("mailboxes", "default", name), {"limit": 1000}, retries=Retries())
        return [row for row in (await self._operator.hub.run(plan))["messages"] if row["topic"]]


async def one_round(load: Load, pids: Sequence[int], count: int, found: Measured) -> None:
    """Publish so many messages, and send as many times to each subscriber."""
    before = sum(map(process_s, pids))
    reader = asyncio.create_task(load.read(count))
    published = await load.publish_steadily(count)
    in_hand = await reader
    await asyncio.sleep(REST_S)
    middle = sum(map(process_s, pids))
    await load.send_steadily(count)
    await asyncio.sleep(REST_S)
    after = sum(map(process_s, pids))
    found.published_at |= published
    # The reader takes them in the order of their publication.
    found.read_at |= dict(zip(published, in_hand, strict=False))
    found.topic_cpu_s += middle - before
    found.sends_cpu_s += after - middle
    say(f"{count} messages: {middle - before:.2f} s of the gateways; sent one by one: {after - middle:.2f} s")


def arrivals(
    published_at: Mapping[str, float], mailboxes: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[dict[str, float], list[str]]:
    """Return when the last copy of each message came, in seconds since 1970, and what is missing or double.

    Args:
        published_at: The ids of the published messages.
        mailboxes: By subscriber, its messages of topics as the gateway shows them.
    """
    last: dict[str, float] = {}
    errors: list[str] = []
    for name, rows in mailboxes.items():
        counts = Counter(str(row["broadcast_id"]) for row in rows)
        missing = sum(counts[message_id] == 0 for message_id in published_at)
        double = sum(count - 1 for count in counts.values())
        if missing or double:
            errors.append(f"{name}: {missing} missing, {double} double")
        for row in rows:
            moment = datetime.fromisoformat(row["posted_at"]).timestamp()
            last[row["broadcast_id"]] = max(moment, last.get(row["broadcast_id"], 0.0))
    return last, errors


async def all_rounds(load: Load, pids: Sequence[int], names: Sequence[str], counts: Sequence[int]) -> Any:
    """Measure, and read all mailboxes."""
    await load.publish()  # what the first message costs alone is not measured
    await load.send_to_each()
    await load.read(1)
    found = Measured()
    for count in counts:
        await one_round(load, pids, count, found)
    mailboxes = {name: await load.mailbox(name) for name in names}
    warm = {row["broadcast_id"] for rows in mailboxes.values() for row in rows} - set(found.published_at)
    if len(warm) != 1:
        raise RuntimeError(f"{len(warm)} messages beside those that were published")
    ours = {name: [row for row in rows if row["broadcast_id"] not in warm] for name, rows in mailboxes.items()}
    last, errors = arrivals(found.published_at, ours)
    took = [
        max(last.get(one, 0.0), found.read_at.get(one, 0.0)) - moment
        for one, moment in found.published_at.items()
    ]
    return {
        "subscribers": len(names),
        "messages": len(found.published_at),
        "p50_s": round(quantile(took, 0.5), 3),
        "p99_s": round(quantile(took, 0.99), 3),
        "topic_cpu_s": round(found.topic_cpu_s, 2),
        "sends_cpu_s": round(found.sends_cpu_s, 2),
        "cpu_ratio": round(found.topic_cpu_s / found.sends_cpu_s, 3),
        "errors": errors[:20],
    }


def measure(settings: Settings, subscribers: int, counts: Sequence[int]) -> dict[str, Any]:
    """Register and subscribe all, and run the rounds."""
    names = [f"agent-{number:05d}" for number in range(subscribers)]
    with CheckoutStack(settings, (KAFKA, GATEWAY)) as stack, operator_client(settings) as operator:
        token = settings.operator_token_file.read_text().strip()
        tokens = {name: add_principal(operator, name, "worker") for name in names}
        for name in names:
            operator.post(f"/api/hub/topics/{TOPIC}/subscribe", json={"subscriber": name}).raise_for_status()
        say(f"{subscribers} are subscribed")
        with stack.second_gateway() as (_, other):
            pids = [pid for pid in (stack[GATEWAY].pid, other.pid) if pid is not None]

            async def all_of_it() -> dict[str, Any]:
                async with Load(settings.gateway_url, token, tokens[names[-1]], names) as load:
                    return dict(await all_rounds(load, pids, names, counts))

            return asyncio.run(all_of_it())


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure on a stack without pages and agents' MCP."""
    # Also then nothing is left: the second gateway is no part of the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    share, rest = divmod(args.seconds, args.rounds)
    counts = [share + (number < rest) for number in range(args.rounds)]
    doors = {"dashboard": DashboardSettings(port=0), "agent_mcp": AgentMcpSettings(port=0)}
    settings = stack_settings(work / "data", **doors)
    return measure(settings, args.subscribers, [count for count in counts if count])


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("topics", __doc__, AT_MOST)
    bench.add_argument("--seconds", type=int, default=60, help="messages, one a second (default 60)")
    bench.add_argument("--rounds", type=int, default=3, help="turns of both sides (default 3)")
    text = f"subscribers (default {SUBSCRIBERS})"
    bench.add_argument("--subscribers", type=int, default=SUBSCRIBERS, help=text)
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
