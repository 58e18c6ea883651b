"""How fast agents exchange messages at the HTTP hub, next to the same front over NATS JetStream.

30 agents, each a worker, all at once. First with Kafka and gateway alone, in turns with the peer, three rounds,
of which the medians count: roundtrips (send, then drain until it is there), then only sends. Then a second
gateway, and how long after its answer a message can be drained there. Then the stack is started anew on the
same data with all its parts, Spark too, and gets a steady load of job events: sends and the second gateway once
more. `spark_busy_ratio` compares these sends with those without Spark. Kafka does not sync each record to disk
here, the peer does. Limits that were not held are in `not_held`, and the exit code is 1.

`us_per_op` are the microseconds of processor time that each program uses for a send, and `us_per_roundtrip`
for a roundtrip, of which `load` is this program; `peer_...` are those of the peer. They do not depend on which
program has the machine. `ratio_cpu` compares gateway and broker with the peer's front and NATS.

A Kafka that has just started needs two to three times as much for a send as after a minute of load, because
Java compiles meanwhile. With the default lengths the medians show little of it, with `--seconds 5` much. The
sends with Spark busy are the first of a new Kafka.

    ./trunkline bench hub --json

With `--against COMMIT` the gateway of that commit takes the turns of the peer (`before_...`), each with a Kafka
of its own. `ratio_before` compares the sends, `ratio_before_roundtrips` the roundtrips.

    ./trunkline bench hub --against HEAD~1 --json

With `--durable` it measures, in turns, a Kafka that syncs each batch to its disk (`synced_...`), as the peer
does, one that does not, and three nodes that do not (`three_...`).

    ./trunkline bench hub --durable --json

With `--through library` it measures something else: the processor time of a client per request, through the
library's `AsyncAgent` and by a hand-written client on aiohttp, in turns. `client_cpu_ratio` is library over
control.

    ./trunkline bench hub --through library --seconds 4
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from connectors.programs.local_stack import LocalStack, free_port
from connectors.programs.local_stack.part_plan import ALL_PARTS, GATEWAY, KAFKA
from schemas.keys.sealing import load_keyring
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import AgentMcpSettings, DashboardSettings, Settings
from schemas.streams.job.job_registry import JOB_EVENT
from tests.benchmarks import library_load
from tests.benchmarks.bench_report import (
    Bench,
    Figures,
    add_phase,
    in_turns,
    judged,
    medians,
    prefixed,
    ratios,
    teller,
)
from tests.benchmarks.bench_stack import (
    AGAINST,
    CheckoutStack,
    Server,
    compared_with_commit,
    operator_client,
)
from tests.benchmarks.event_load import events, fill, jobs_for, registrations
from tests.benchmarks.freshness_load import publish_steadily
from tests.benchmarks.hub_load import roundtrips, sends, visible
from tests.benchmarks.hub_peer import peer
from tests.broker_processes import LOOPBACK
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.own_settings import stack_settings

AGENTS = 30
# Beside the peer in the same run, and with Spark idle; and sends with Spark busy, relative to those without it.
AT_MOST = {"visible_p99_ms": 50, "ratio_roundtrip": 1.3, "ratio_cpu": 1.1}
AT_LEAST = {"ratio_sends": 1.0, "visible_per_s": 195, "spark_busy_ratio": 0.7}
RATIOS = {
    "ratio_roundtrip": ("roundtrip_p50_ms", "peer_p50_ms"),
    "ratio_sends": ("sends_per_s", "peer_sends_per_s"),
    "ratio_cpu": ("us_per_op", "peer_us_per_op"),
    "spark_busy_ratio": ("sends_per_s_spark_busy", "sends_per_s"),
}
DURABLE_RATIOS = {
    "ratio_synced_sends": ("synced_sends_per_s", "unsynced_sends_per_s"),
    "ratio_synced_roundtrip": ("synced_p50_ms", "unsynced_p50_ms"),
    "ratio_three_sends": ("three_sends_per_s", "unsynced_sends_per_s"),
    "ratio_three_roundtrip": ("three_p50_ms", "unsynced_p50_ms"),
    "ratio_sends": ("synced_sends_per_s", "peer_sends_per_s"),
    "ratio_roundtrip": ("synced_p50_ms", "peer_p50_ms"),
}
ROUNDS = 3
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


def one_round(server: Server, tokens: dict[str, str], seconds: float) -> Figures:
    """Measure roundtrips, then sends."""
    trips = asyncio.run(roundtrips(server, tokens, seconds))
    return {**trips, **asyncio.run(sends(server, tokens, seconds))}


def visible_elsewhere(stack: CheckoutStack, tokens: dict[str, str]) -> Figures:
    """Send messages at the stack's gateway and drain them at a second one."""
    first = stack.settings.gateway.port
    with stack.second_gateway() as (other, _):
        found = asyncio.run(visible(first, other.gateway.port, tokens, VISIBLE_RATE, VISIBLE_S))
    say(f"at another gateway, at {VISIBLE_RATE} messages/s: {found}")
    return medians([found])


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


def idle_figures(stack: CheckoutStack, work: Path, tokens: dict[str, str], args: argparse.Namespace) -> Figures:
    """Measure Kafka and gateway alone, in turns with the peer; then the second gateway."""
    with peer(work / "peer", tokens) as other:
        sides = {
            side: partial(one_round, server, tokens, args.seconds)
            for side, server in (("ours", stack.server(GATEWAY, KAFKA)), ("peer", other))
        }
        found = in_turns(args.rounds, sides, say)
    mine, theirs = medians(found["ours"]), medians(found["peer"])
    return {
        "roundtrip_p50_ms": mine.pop("p50_ms"),
        "roundtrip_p99_ms": mine.pop("p99_ms"),
        **mine,
        **visible_elsewhere(stack, tokens),
        "peer": PEER,
        **prefixed("peer", theirs),
    }


def busy_figures(stack: CheckoutStack, tokens: dict[str, str], args: argparse.Namespace) -> Figures:
    """Measure sends and the second gateway with all parts up and job events coming in."""
    length_s = int(args.warm + 2 * (args.seconds + 2 * VISIBLE_S)) + SLACK_S
    settings = stack.settings
    with job_load(settings, args.rate, length_s):
        say(f"{args.rate} job events/s; Spark warms up for {args.warm} s")
        time.sleep(args.warm)
        first, began = end_offsets(settings), time.monotonic()
        found = asyncio.run(sends(stack.server(GATEWAY, KAFKA), tokens, args.seconds))
        last, ended = end_offsets(settings), time.monotonic()
        say(f"Spark busy: {found}")
        found |= visible_elsewhere(stack, tokens)
    found["job_events_per_s"] = job_events(settings, first, last) / (ended - began)
    return {f"{name}_spark_busy": value for name, value in medians([found]).items()}


def measure(settings: Settings, work: Path, args: argparse.Namespace) -> Figures:
    """Measure both phases, each with a start of the stack on the same data."""
    result: Figures = {}
    with CheckoutStack(settings, (KAFKA, GATEWAY)) as stack:
        tokens = add_agents(stack.settings)
        add_phase(result, lambda: idle_figures(stack, work, tokens, args))
    say("the stack starts again with all its parts")

    def busy() -> Figures:
        with CheckoutStack(settings, ALL_PARTS) as stack:
            return busy_figures(stack, tokens, args)

    add_phase(result, busy)
    return {**result, **ratios(result, RATIOS), "note": NOTE}


def measure_client(settings: Settings, seconds: float) -> Figures:
    """Measure with Kafka and gateway alone the cost of a client through the library beside the control's."""
    with LocalStack(settings, parts=(KAFKA, GATEWAY)):
        found = library_load.client_cost(settings.gateway_url, add_agents(settings), seconds)
    # In turns, so the limit counts with any options.
    return {**found, **judged(found, library_load.AT_MOST)}


def measure_durable(work: Path, args: argparse.Namespace) -> Figures:
    """Measure in turns what it costs that a disk may be lost, or the power, and the peer."""
    servers = ",".join(f"{LOOPBACK}:{free_port()}" for _ in range(3))
    kinds: dict[str, dict[str, object]] = {
        "synced": {"sync_each_batch": True},
        "unsynced": {},
        "three": {"bootstrap_servers": servers, "replication_factor": 3},
    }
    with ExitStack() as opened:
        sides: dict[str, Callable[[], Figures]] = {}
        for side, changes in kinds.items():
            settings = settings_in(work / side)
            settings = settings.model_copy(update={"kafka": settings.kafka.model_copy(update=changes)})
            stack = opened.enter_context(CheckoutStack(settings, (KAFKA, GATEWAY)))
            tokens = add_agents(stack.settings)
            sides[side] = partial(one_round, stack.server(*stack.parts), tokens, args.seconds)
        other = opened.enter_context(peer(work / "peer", tokens))
        sides["peer"] = partial(one_round, other, tokens, args.seconds)
        found = in_turns(args.rounds, sides, say)
    result: Figures = {"peer": PEER}
    for side, figures in found.items():
        result |= prefixed(side, medians(figures))
    return {**result, **ratios(result, DURABLE_RATIOS)}


def add_agents(settings: Settings) -> dict[str, str]:
    """Add the agents at the gateway, and return their tokens."""
    names = [f"agent-{number:02d}" for number in range(AGENTS)]
    with operator_client(settings) as operator:
        return {name: add_principal(operator, name, "worker") for name in names}


def settings_in(folder: Path) -> Settings:
    """Return settings of a stack without pages and agents' MCP."""
    return stack_settings(folder, dashboard=DashboardSettings(port=0), agent_mcp=AgentMcpSettings(port=0))


def run(args: argparse.Namespace, work: Path) -> Figures:
    """Measure what the options ask for."""
    # Also then nothing is left: the second gateway is no part of the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.through == LIBRARY:
        return measure_client(settings_in(work / "data"), args.seconds)
    if args.durable:
        return measure_durable(work, args)
    say(NOTE)
    if args.against is None:
        return measure(settings_in(work / "data"), work, args)

    def prepare(stack: CheckoutStack) -> Callable[[], Figures]:
        return partial(one_round, stack.server(GATEWAY, KAFKA), add_agents(stack.settings), args.seconds)

    return compared_with_commit(args, work, settings_in, prepare, "sends_per_s")


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("hub", __doc__, AT_MOST, AT_LEAST)
    bench.add_argument("--seconds", type=float, default=15, help="length of each measurement (default 15)")
    bench.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each side (default {ROUNDS})")
    bench.add_argument("--rate", type=int, default=500, help="job events a second while busy (default 500)")
    warm_up = "length of that load before it counts (default 30)"
    bench.add_argument("--warm", type=int, default=30, help=warm_up)
    through = "measure instead what a client through the library costs beside the control"
    bench.add_argument("--through", choices=[LIBRARY], help=through)
    bench.add_argument("--against", metavar="COMMIT", help=AGAINST)
    durable = "measure instead what a synced disk costs, and three nodes of Kafka, beside the peer"
    bench.add_argument("--durable", action="store_true", help=durable)
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
