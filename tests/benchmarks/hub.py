"""How fast agents exchange messages at the HTTP hub, next to the same front over NATS JetStream.

30 agents, each a worker with a client of its own, all at once. First with Kafka and gateway alone, in turns
with the peer, two rounds, of which the medians count: roundtrips (send, then drain until it is there), then
only sends. Then a second gateway, and how long after its answer a message can be drained there. Then the stack
is started anew on the same data with all its parts, Spark too, and gets a steady load of job events: sends and
the second gateway once more. `spark_busy_ratio` compares these sends with those without Spark. Kafka does not
sync each record to disk here, the peer does. Limits that were not held are in `not_held`, and the exit code is
1.

    ./trunkline bench hub --json

With `--through library` it measures something else: the processor time of a client per request, through the
library's `AsyncAgent` and by the hand-written client of all other figures, in turns. `client_cpu_ratio` is
library over control.

    ./trunkline bench hub --through library --seconds 4
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx

from connectors.local_stack import LocalStack
from connectors.local_stack.part_plan import GATEWAY, KAFKA
from schemas.keys.sealing import load_keyring
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import AgentMcpSettings, DashboardSettings, Settings
from schemas.streams.job.job_event import JOB_EVENT
from tests.benchmarks import library_load
from tests.benchmarks.bench_report import Bench, medians, not_held, teller
from tests.benchmarks.bench_stack import operator_client
from tests.benchmarks.event_load import events, fill, jobs_for, registrations
from tests.benchmarks.freshness_load import publish_steadily
from tests.benchmarks.hub_load import Visible, roundtrips, sends_per_s, visible
from tests.benchmarks.hub_peer import peer
from tests.connectors.gateway.hub_access import GatewayProcess, add_principal
from tests.own_settings import stack_settings

AGENTS = 30
# Beside the peer in the same run, and with Spark idle; and sends with Spark busy, relative to those without it.
AT_MOST = {"visible_p99_ms": 50, "ratio_roundtrip": 1.3}
AT_LEAST = {"ratio_sends": 1.0, "visible_per_s": 195, "spark_busy_ratio": 0.7}
ROUNDS = 2
LIBRARY = "library"
VISIBLE_RATE, VISIBLE_S = 200, 10
START_S = 60.0
# Time that the busy phase may take beyond its measured times: the second gateway's start, and the drains.
SLACK_S = 90
PEER = "FastAPI over NATS JetStream, sync_interval: always"
NOTE = (
    "Kafka does not sync each record to disk here (it leaves that to the kernel, its default), the peer does: "
    "a power cut can take from ours what was answered for, a kill -9 cannot."
)


say = teller("hub")


@dataclass(frozen=True)
class Round:
    """The figures of one round at one address."""

    p50_ms: float
    p99_ms: float
    roundtrips_per_s: float
    sends_per_s: float


def one_round(name: str, url: str, tokens: dict[str, str], seconds: float) -> Round:
    """Roundtrips, then sends."""
    trips = asyncio.run(roundtrips(url, tokens, seconds))
    sent = asyncio.run(sends_per_s(url, tokens, seconds))
    say(
        f"{name}: roundtrip p50 {trips.p50_ms:.1f} ms, p99 {trips.p99_ms:.1f} ms, {trips.per_s:.0f}/s; "
        f"{sent:.0f} sends/s"
    )
    return Round(trips.p50_ms, trips.p99_ms, trips.per_s, sent)


@contextmanager
def second_gateway(settings: Settings, folder: Path) -> Iterator[GatewayProcess]:
    """One more gateway over the same Kafka, on a port of its own."""
    gateway = GatewayProcess(settings, folder)
    try:
        gateway.program.wait_ready(START_S)
        yield gateway
    finally:
        gateway.program.stop()


def visible_elsewhere(name: str, settings: Settings, folder: Path, tokens: dict[str, str]) -> Visible:
    """Send messages at the stack's gateway and drain them at a second one."""
    with second_gateway(settings, folder) as other:
        found = asyncio.run(visible(settings.gateway_url, other.url, tokens, VISIBLE_RATE, VISIBLE_S))
    say(
        f"{name}: at another gateway after p50 {found.p50_ms:.1f} ms, p99 {found.p99_ms:.1f} ms, "
        f"at {found.per_s:.0f} of {VISIBLE_RATE} messages/s"
    )
    return found


def publish_jobs(settings: Settings, rate: int, seconds: int, begun: Event) -> None:
    """The load of job events, in a process of its own. Ends after `seconds`, or when it is terminated."""
    count = rate * seconds
    fill(settings, registrations(jobs_for(count), load_keyring(settings)))
    records = list(events(count))
    time.sleep(5)  # the accounts of the new jobs are not what is measured
    begun.set()
    publish_steadily(settings, records, rate)


@contextmanager
def job_load(settings: Settings, rate: int, seconds: int) -> Iterator[None]:
    """The load while the body runs. Raises RuntimeError when it ended before the body did."""
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    load = spawn.Process(target=publish_jobs, args=(settings, rate, seconds, begun), daemon=True)
    load.start()
    try:
        if not begun.wait(START_S):
            raise RuntimeError("the load of job events did not begin")
        yield
        if not load.is_alive():
            raise RuntimeError("the load of job events ended before the measurement did")
    finally:
        load.terminate()
        load.join(10)


def end_offsets(settings: Settings) -> dict[Any, int]:
    """The next offset of each partition."""
    with topic_reader(settings.kafka) as consumer:
        return dict(consumer.end_offsets(sorted(consumer.assignment())))


def job_events(settings: Settings, first: dict[Any, int], last: dict[Any, int]) -> int:
    """How many job events lie between these offsets."""
    found = 0
    deadline = time.monotonic() + START_S
    with topic_reader(settings.kafka) as consumer:
        for partition, offset in first.items():
            consumer.seek(partition, offset)
        while any(consumer.position(partition) < end for partition, end in last.items()):
            if time.monotonic() > deadline:
                raise RuntimeError("the topic could not be read back")
            for partition, batch in consumer.poll(timeout_ms=200).items():
                kinds = [dict(one.headers)["ce_type"] for one in batch if one.offset < last[partition]]
                found += kinds.count(JOB_EVENT.encode())
    return found


def idle_figures(settings: Settings, work: Path, tokens: dict[str, str], seconds: float) -> dict[str, Any]:
    """Kafka and gateway alone, in turns with the peer; then the second gateway."""
    ours: list[Round] = []
    theirs: list[Round] = []
    with peer(work / "peer", tokens) as peer_url:
        for number in range(1, ROUNDS + 1):
            ours.append(one_round(f"ours, round {number}", settings.gateway_url, tokens, seconds))
            theirs.append(one_round(f"peer, round {number}", peer_url, tokens, seconds))
    mine, other = medians(ours), medians(theirs)
    there = visible_elsewhere("idle", settings, work, tokens)
    return {
        "roundtrip_p50_ms": round(mine.p50_ms, 1),
        "roundtrip_p99_ms": round(mine.p99_ms, 1),
        "roundtrips_per_s": round(mine.roundtrips_per_s),
        "sends_per_s": round(mine.sends_per_s),
        "visible_p99_ms": round(there.p99_ms, 1),
        "visible_per_s": round(there.per_s),
        "peer": PEER,
        "peer_p50_ms": round(other.p50_ms, 1),
        "peer_p99_ms": round(other.p99_ms, 1),
        "peer_roundtrips_per_s": round(other.roundtrips_per_s),
        "peer_sends_per_s": round(other.sends_per_s),
        "ratio_roundtrip": round(mine.p50_ms / other.p50_ms, 3),
        "ratio_sends": round(mine.sends_per_s / other.sends_per_s, 3),
    }


def busy_figures(
    settings: Settings, work: Path, tokens: dict[str, str], seconds: float, rate: int, warm_s: int
) -> dict[str, Any]:
    """All parts up and job events coming in: sends, and the second gateway."""
    length_s = int(warm_s + 2 * (seconds + 2 * VISIBLE_S)) + SLACK_S
    with job_load(settings, rate, length_s):
        say(f"{rate} job events/s; Spark warms up for {warm_s} s")
        time.sleep(warm_s)
        first, began = end_offsets(settings), time.monotonic()
        sent = asyncio.run(sends_per_s(settings.gateway_url, tokens, seconds))
        last, ended = end_offsets(settings), time.monotonic()
        say(f"Spark busy: {sent:.0f} sends/s")
        there = visible_elsewhere("Spark busy", settings, work, tokens)
    arrived = job_events(settings, first, last) / (ended - began)
    say(f"Spark busy: {arrived:.0f} job events/s came into Kafka while the agents sent")
    return {
        "sends_per_s_spark_busy": round(sent),
        "visible_p99_ms_spark_busy": round(there.p99_ms, 1),
        "visible_per_s_spark_busy": round(there.per_s),
        "job_events_per_s_spark_busy": round(arrived),
    }


def measure(settings: Settings, work: Path, seconds: float, rate: int, warm_s: int) -> dict[str, Any]:
    """Both phases, each with a start of the stack on the same data."""
    with LocalStack(settings, parts=(KAFKA, GATEWAY)):
        with operator_client(settings) as operator:
            tokens = add_agents(operator)
        result = idle_figures(settings, work, tokens, seconds)
    say("the stack starts again with all its parts")
    with LocalStack(settings):
        result |= busy_figures(settings, work, tokens, seconds, rate, warm_s)
    ratio = round(result["sends_per_s_spark_busy"] / result["sends_per_s"], 3)
    return {**result, "spark_busy_ratio": ratio, "note": NOTE}


def measure_client(settings: Settings, seconds: float) -> dict[str, Any]:
    """Kafka and gateway alone: the cost of a client through the library beside that of the control."""
    with LocalStack(settings, parts=(KAFKA, GATEWAY)), operator_client(settings) as operator:
        tokens = add_agents(operator)
        found = library_load.client_cost(settings.gateway_url, tokens, seconds)
    # In turns, so the limit counts with any options.
    return {**found, "not_held": not_held(found, library_load.AT_MOST)}


def add_agents(operator: httpx.Client) -> dict[str, str]:
    """Add the agents, and return their tokens."""
    names = [f"agent-{number:02d}" for number in range(AGENTS)]
    return {name: add_principal(operator, name, "worker") for name in names}


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure on a stack without pages and agents' MCP."""
    # Also then nothing is left: the second gateway is no part of the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    doors = {"dashboard": DashboardSettings(port=0), "agent_mcp": AgentMcpSettings(port=0)}
    settings = stack_settings(work / "data", **doors)
    if args.through == LIBRARY:
        return measure_client(settings, args.seconds)
    say(NOTE)
    return measure(settings, work, args.seconds, args.rate, args.warm)


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("hub", __doc__, AT_MOST, AT_LEAST)
    bench.add_argument("--seconds", type=float, default=15, help="length of each measurement (default 15)")
    bench.add_argument("--rate", type=int, default=500, help="job events a second while busy (default 500)")
    warm_up = "length of that load before it counts (default 30)"
    bench.add_argument("--warm", type=int, default=30, help=warm_up)
    through = "measure instead what a client through the library costs beside the control"
    bench.add_argument("--through", choices=[LIBRARY], help=through)
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
