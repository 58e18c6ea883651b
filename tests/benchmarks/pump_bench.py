"""How fast the XML pump handles messages: the pipeline as a library, and the whole durable path.

The pipeline next to the package `xml-pipeline`, in turns (`pump_pipeline.py` says what is compared). The
durable path: 30 senders post at once to the gateway, over real Kafka; a pump process leases, checks, handles
and acknowledges; counted until each answer lies in its sender's mailbox. Once with one listener, once with 20.
Kafka does not sync each record to disk here.

    ./trunkline bench pump --json
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from connectors.local_stack import LocalStack
from connectors.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import AgentMcpSettings, DashboardSettings, XmlPumpSettings
from tests.benchmarks.bench_report import Bench, teller
from tests.benchmarks.bench_stack import operator_client
from tests.benchmarks.pump_echo import MOST, NAMESPACE, organism
from tests.benchmarks.pump_pipeline import measure_pipeline
from tests.connectors.gateway.hub_access import add_principal
from tests.own_settings import stack_settings

SENDERS = 30
WITHIN_S = 120.0
PUMP = "xml_pump"
_POLL_S = 0.05


say = teller("pump")


def document(number: int, listeners: int) -> str:
    """A message to one of the listeners."""
    tag = f"echo{number % listeners}"
    return (
        f'<message xmlns="urn:trunkline:envelope:1"><{tag} xmlns="{NAMESPACE}">'
        f"<said>step {number} of 12000 is done, reading the index</said></{tag}></message>"
    )


async def post_all(url: str, tokens: dict[str, str], count: int, listeners: int) -> None:
    """Post so many messages, shared between the senders. Raises RuntimeError for any other answer than 202."""
    numbers = iter(range(count))

    async def one(token: str) -> None:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/xml"}
        async with aiohttp.ClientSession(url, headers=headers) as client:
            for number in numbers:
                async with client.post("/messages", data=document(number, listeners)) as answer:
                    if answer.status != 202:
                        raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")

    await asyncio.gather(*(one(token) for token in tokens.values()))


def wait_answers(operator: httpx.Client, names: list[str], wanted: int) -> None:
    """Wait until so many messages lie in these mailboxes. Raises RuntimeError."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        found = sum(
            operator.get(f"/api/hub/mailboxes/default/{name}", params={"limit": 1}).json()["total"]
            for name in names
        )
        if found >= wanted:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{found} of {wanted} answers were there in time")
        time.sleep(_POLL_S)


def durable(work: Path, listeners: int, count: int) -> dict[str, float]:
    """Messages a second, from the first post to the last answer; and how fast they were taken."""
    work.mkdir()
    file = work / "organism.yaml"
    file.write_text(organism(listeners, concurrency=64))
    settings = stack_settings(
        work / "data",
        dashboard=DashboardSettings(port=0),
        agent_mcp=AgentMcpSettings(port=0),
        xml_pump=XmlPumpSettings(organism_file=file, pending_most=100_000, pending_per_sender=100_000),
    )
    with LocalStack(settings, parts=(KAFKA, GATEWAY, PUMP)), operator_client(settings) as operator:
        names = [f"sender-{number:02d}" for number in range(SENDERS)]
        tokens = {name: add_principal(operator, name, "worker") for name in names}
        warm = count // 10
        asyncio.run(post_all(settings.gateway_url, tokens, warm, listeners))
        wait_answers(operator, names, warm)
        began = time.monotonic()
        asyncio.run(post_all(settings.gateway_url, tokens, count, listeners))
        posted = time.monotonic()
        wait_answers(operator, names, warm + count)
        ended = time.monotonic()
    found = {"per_s": count / (ended - began), "posted_per_s": count / (posted - began)}
    say(f"{listeners} listeners: {found['per_s']:.0f} messages/s; taken at {found['posted_per_s']:.0f}/s")
    return found


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The durable path with one listener and with many, then the pipeline."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    one, many = durable(work / "one", 1, args.messages), durable(work / "many", MOST, args.messages)
    return {
        "durable_per_s": round(one["per_s"]),
        f"durable_per_s_{MOST}_listeners": round(many["per_s"]),
        "posted_per_s": round(one["posted_per_s"]),
        **measure_pipeline(args.seconds),
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("pump", __doc__)
    bench.add_argument("--seconds", type=float, default=10, help="length of the pipeline's part (default 10)")
    durable_part = "messages of the durable part (default 6000)"
    bench.add_argument("--messages", type=int, default=6000, help=durable_part)
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
