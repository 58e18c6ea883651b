"""How fast the XML pump handles messages: the pipeline as a library, and the whole durable path.

The pipeline next to the package `xml-pipeline`, in turns (`pump_pipeline.py` says what is compared). The
durable path: 30 senders post at once to the gateway, over real Kafka; a pump process leases, checks, handles
and acknowledges. It is timed from the first post until the last answer is in the log. Then each answer must be
in its sender's mailbox. Once with one listener, once with 20. In turns with each run are two controls with the
same records: a bare producer and consumer (`pump_log.py`), and the same behind HTTP, which answers a request
when Kafka has all records of its message (`pump_http_control.py`). Kafka does not sync each record to disk
here. Limits that were not held are in `not_held`, and the exit code is 1.

    ./trunkline bench pump --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from connectors.programs.local_stack import LocalStack, free_port
from connectors.programs.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import AgentMcpSettings, DashboardSettings, Settings, XmlPumpSettings
from tests.benchmarks import pump_http_control
from tests.benchmarks.bench_report import Bench, Figures, add_phase, digits, in_turns, medians, ratios, teller
from tests.benchmarks.bench_stack import beside, operator_client
from tests.benchmarks.lean_http import open_connection, request_bytes
from tests.benchmarks.process_times import stack_s
from tests.benchmarks.pump_echo import MOST, NAMESPACE, organism
from tests.benchmarks.pump_log import Answers, control_per_s, record_shares, total_per_message
from tests.benchmarks.pump_pipeline import measure_pipeline
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.own_settings import stack_settings

SENDERS = 30
WITHIN_S = 120.0
PUMP = "xml_pump"
ROUNDS = 3
AT_LEAST = {"control_ratio": 0.35}
RATIOS = {
    "control_ratio": ("durable_per_s", "control_per_s"),
    "control_http_ratio": ("durable_per_s", "control_http_per_s"),
}


say = teller("pump")


def document(number: int, listeners: int) -> str:
    """A message to one of the listeners."""
    tag = f"echo{number % listeners}"
    return (
        f'<message xmlns="urn:trunkline:envelope:1"><{tag} xmlns="{NAMESPACE}">'
        f"<said>step {number} of 12000 is done, reading the index</said></{tag}></message>"
    )


async def post_all(port: int, tokens: Mapping[str, str], count: int, listeners: int) -> None:
    """Post so many messages, shared between the senders. Raises RuntimeError for any other answer than 202."""
    numbers = iter(range(count))

    async def one(token: str) -> None:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/xml"}
        connection = await open_connection(port)
        try:
            for number in numbers:
                body = document(number, listeners).encode()
                status, said = await connection.ask(request_bytes("POST", "/messages", headers, body), WITHIN_S)
                if status != 202:
                    raise RuntimeError(f"{status}: {said[:300]!r}")
        finally:
            connection.close()

    await asyncio.gather(*(one(token) for token in tokens.values()))


def wait_listeners(operator: httpx.Client, wanted: int) -> None:
    """Wait until the gateway has loaded the organism file. Raises RuntimeError."""
    deadline = time.monotonic() + WITHIN_S
    while len(operator.get("/api/hub/listeners").raise_for_status().json()["listeners"]) < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError("the gateway has not loaded the listeners")
        time.sleep(0.1)


def check_mailboxes(operator: httpx.Client, names: list[str], wanted: int) -> None:
    """Check that the senders' mailboxes have so many messages. Raises RuntimeError."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        pages = (operator.get(f"/api/hub/mailboxes/default/{name}", params={"limit": 1}) for name in names)
        found = sum(page.raise_for_status().json()["total"] for page in pages)
        if found == wanted:
            return
        if found > wanted or time.monotonic() > deadline:
            raise RuntimeError(f"the mailboxes have {found} answers to {wanted} messages")
        time.sleep(0.5)


def posted_per_s(port: int, tokens: Mapping[str, str], count: int, listeners: int) -> float:
    """Post so many messages; return how many a second were answered."""
    began = time.monotonic()
    asyncio.run(post_all(port, tokens, count, listeners))
    return count / (time.monotonic() - began)


def durable(settings: Settings, tokens: Mapping[str, str], listeners: int, args: argparse.Namespace) -> Figures:
    """Return the medians of some rounds, in turns with both controls. The stack is running."""
    port, kafka, count = settings.gateway.port, settings.kafka, args.messages
    wanted = count // 3
    with Answers(kafka, "mailbox/default/sender-") as answers:
        asyncio.run(post_all(port, tokens, wanted, listeners))
        answers.wait(wanted, WITHIN_S)
        shares = record_shares(kafka, wanted)

        def ours() -> Figures:
            nonlocal wanted
            wanted += count
            began = time.monotonic()
            posted = posted_per_s(port, tokens, count, listeners)
            answers.wait(wanted, WITHIN_S)
            return {"durable_per_s": count / (time.monotonic() - began), "posted_per_s": posted}

        def bare() -> Figures:
            return {"control_per_s": control_per_s(kafka, shares, SENDERS, count)}

        http_port = free_port()
        program = (pump_http_control.__name__, str(http_port), json.dumps(shares))
        with beside(settings, "http_control", *program):

            def with_http() -> Figures:
                return {"control_http_per_s": posted_per_s(http_port, tokens, count, 1)}

            sides = {"ours": ours, "control": bare, "control_http": with_http}
            rounds = in_turns(args.rounds, sides, say)
    medians_of = [medians(found) for found in rounds.values()]
    return {**medians_of[0], **medians_of[1], **medians_of[2], **total_per_message(shares)}


def run_stack(work: Path, listeners: int, args: argparse.Namespace) -> Figures:
    """Start Kafka, a gateway and a pump, and measure the durable path."""
    work.mkdir()
    file = work / "organism.yaml"
    file.write_text(organism(listeners, concurrency=64))
    settings = stack_settings(
        work / "data",
        dashboard=DashboardSettings(port=0),
        agent_mcp=AgentMcpSettings(port=0),
        xml_pump=XmlPumpSettings(organism_file=file, pending_most=100_000, pending_per_sender=100_000),
    )
    names = [f"sender-{number:02d}" for number in range(SENDERS)]
    with LocalStack(settings, parts=(KAFKA, GATEWAY, PUMP)), operator_client(settings) as operator:
        tokens = {name: add_principal(operator, name, "worker") for name in names}
        wait_listeners(operator, listeners)
        before = stack_s(settings)
        found = durable(settings, tokens, listeners, args)
        after, total = stack_s(settings), args.messages // 3 + args.rounds * args.messages
        check_mailboxes(operator, names, total)
    cpu_ms = {part: digits((after[part] - before[part]) * 1000 / total) for part in (GATEWAY, PUMP)}
    return {**found, "cpu_ms_per_message": cpu_ms}


def measure(args: argparse.Namespace, work: Path) -> Figures:
    """Measure the durable path with one listener and with many, then the pipeline."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: Figures = {}
    add_phase(found, lambda: run_stack(work / "one", 1, args))
    add_phase(found, lambda: many_listeners(work / "many", args))
    add_phase(found, lambda: measure_pipeline(args.seconds))
    return {**found, **ratios(found, RATIOS)}


def many_listeners(work: Path, args: argparse.Namespace) -> Figures:
    """Return the rate of the durable path with many listeners."""
    return {f"durable_per_s_{MOST}_listeners": run_stack(work, MOST, args)["durable_per_s"]}


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("pump", __doc__, at_least=AT_LEAST)
    bench.add_argument("--seconds", type=float, default=10, help="length of the pipeline's part (default 10)")
    durable_part = "messages of each round of the durable part (default 3000)"
    bench.add_argument("--messages", type=int, default=3000, help=durable_part)
    bench.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default {ROUNDS})")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
