"""How soon a waiting agent has its message in hand, next to the same doors over NATS JetStream.

1,000 agents wait: 900 with `GET /api/hub/messages?wait=30`, which takes the messages, and 100 with the MCP
tool `wait_for_messages`, which then mark them as read. Two gateways, half of the agents at each. First
nothing is sent, and the processor time of the gateways is measured. Then 200 messages a second go to random
agents, and the second gateway is killed in the middle. Its clients go on at the other one. In turns with the
peer, two rounds, of which the medians count. `rates` is a table of short rounds at several rates, without a
kill.

The time runs from the moment at which a message is due until the receiver has it, on one clock. `missed` are
acknowledged messages that nobody has in the end, `empty_answers` answers without a message before the time of
the wait, `failed` requests with another answer than a good one. `us_per_op` are the microseconds of processor
time that each program uses for a message and its receipt, up to the kill; `load` is this program. The MCP
agents make signed calls with a lean client, because 100 of the official one would need the processor that they
measure. Kafka does not sync each record to disk here, the peer does. Limits that were not held are in
`not_held`, and the exit code is 1.

    ./trunkline bench wake --json

With `--against COMMIT` the gateways of that commit take the turns of the peer (`before_...`). `ratio_before`
compares the processor time of a message.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from connectors.programs.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import DashboardSettings, Settings
from tests.benchmarks.bench_report import (
    Bench,
    Figures,
    add_phase,
    in_turns,
    medians,
    numbers,
    prefixed,
    ratios,
    teller,
)
from tests.benchmarks.bench_stack import AGAINST, CheckoutStack, compared_with_commit, operator_client
from tests.benchmarks.wake_load import Clients, Door, Plan, one_round
from tests.benchmarks.wake_peer import Peer, peer
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.own_settings import stack_settings
from trunkline_agent.mcp.signing import load_private_key, new_key_pair

HTTP, MCP, SENDERS = 900, 100, 20
RATE, RATES = 200, [50, 100, 200, 400]
NEVER = ("empty_answers", "missed", "failed")
AT_MOST = {"ratio_p99": 1.5, "idle_cores": 0.05, **dict.fromkeys(NEVER, 0)}
# Otherwise the machine was too busy to send at the rate, and the latencies say nothing.
AT_LEAST = {"sends_per_s": 0.975 * RATE}
PEER = "FastAPI and MCP over NATS JetStream, sync_interval: always"
NOTE = (
    "Kafka does not sync each record to disk here (it leaves that to the kernel, its default), the peer does: "
    "a power cut can take from ours what was answered for, a kill -9 cannot."
)

say = teller("wake")


def join(settings: Settings, http: int, mcp: int) -> tuple[Clients, dict[str, str]]:
    """Register all clients at the gateway; return them, and the public keys of the MCP agents by name."""
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: new_key_pair(), range(mcp)))
    pairs = {f"tool-{number:03d}": pair for number, pair in enumerate(made)}
    with operator_client(settings) as operator:
        agents, senders = (
            {name: add_principal(operator, name, "worker") for name in names}
            for names in (
                [f"agent-{number:03d}" for number in range(http)],
                [f"sender-{number:02d}" for number in range(SENDERS)],
            )
        )
        for name, (_, public) in pairs.items():
            body = {"agent_name": name, "public_key": public}
            operator.post("/api/hub/participants", json=body).raise_for_status()
    keys = {name: load_private_key(private) for name, (private, _) in pairs.items()}
    return Clients(agents, keys, senders), {name: public for name, (_, public) in pairs.items()}


def our_round(stack: CheckoutStack, clients: Clients, plan: Plan) -> Figures:
    """Measure a round at the stack's gateway and a second one, which is killed."""
    with stack.second_gateway() as (settings, other):
        doors = [
            Door(name, at.gateway.port, at.agent_mcp.port, part.pid)
            for name, at, part in (
                (GATEWAY, stack.settings, stack[GATEWAY]),
                (f"{GATEWAY}_2", settings, other),
            )
            if part.pid is not None
        ]
        # Not by the part, which looks for more processes to end: the clients would wait for that.
        kill = partial(os.kill, doors[1].pid, signal.SIGKILL)
        return asyncio.run(one_round(doors, stack.server(KAFKA).pids, clients, plan, kill))


def peer_round(server: Peer, clients: Clients, plan: Plan) -> Figures:
    """Measure a round at two fronts of the peer."""
    with server.front("front") as first, server.front("front_2") as second:
        doors = [
            Door(name, front.port, front.port, front.pid)
            for name, front in (("front", first), ("front_2", second))
        ]
        return asyncio.run(one_round(doors, {"nats": server.pid}, clients, plan, second.kill))


def figures(ours: list[Figures], theirs: list[Figures]) -> Figures:
    """Return the medians of the rounds, but the sums of what must not happen at all."""
    mine, other = (
        medians(rounds) | {name: sum(one[name] for one in rounds) for name in NEVER}
        for rounds in (ours, theirs)
    )
    in_hand = {f"in_hand_{name}": mine.pop(name) for name in ("p50_ms", "p99_ms")}
    result = {**in_hand, **mine, "peer": PEER, **prefixed("peer", other)}
    return {**result, **ratios(result, {"ratio_p99": ("in_hand_p99_ms", "peer_p99_ms")})}


def at_rates(sides: Mapping[str, Callable[[Plan], Figures]], args: argparse.Namespace) -> list[Figures]:
    """Return a row for each rate: the figures of one short round of each side."""
    rows = []
    for rate in args.rates:
        row: Figures = {"rate": rate}
        for name, measure in sides.items():
            found: Figures = {}
            plan = Plan(rate, args.rate_seconds, 0, kills=False)
            add_phase(found, lambda measure=measure, plan=plan: medians([measure(plan)]))  # type: ignore[misc]
            row |= found if name == "ours" else prefixed(name, found)
        say(f"{row}")
        rows.append(row)
    return rows


def measure(settings: Settings, work: Path, args: argparse.Namespace) -> Figures:
    """Measure all rounds in turns with the peer, then the table of rates."""
    plan = Plan(args.rate, args.seconds, args.idle)
    with CheckoutStack(settings, (KAFKA, GATEWAY)) as stack:
        clients, keys = join(stack.settings, args.http, args.mcp)
        say(f"{len(clients.http)} agents over HTTP and {len(keys)} over MCP have joined")
        with peer(work / "peer", {**clients.http, **clients.senders}, keys) as server:
            sides: dict[str, Callable[[Plan], Figures]] = {
                "ours": partial(our_round, stack, clients),
                "peer": partial(peer_round, server, clients),
            }
            turns = {name: partial(measured, plan) for name, measured in sides.items()}
            found = in_turns(args.rounds, turns, say)
            rows = at_rates(sides, args)
    return {**figures(found["ours"], found["peer"]), "rates": rows, "note": NOTE}


def settings_in(folder: Path) -> Settings:
    """Return settings of a stack without pages."""
    return stack_settings(folder, dashboard=DashboardSettings(port=0))


def run(args: argparse.Namespace, work: Path) -> Figures:
    """Measure what the options ask for."""
    # Also then nothing is left: the second gateway is no part of the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(NOTE)
    if args.against is None:
        return measure(settings_in(work / "data"), work, args)

    def prepare(stack: CheckoutStack) -> Callable[[], Figures]:
        clients, _ = join(stack.settings, args.http, args.mcp)
        return partial(our_round, stack, clients, Plan(args.rate, args.seconds, args.idle))

    return compared_with_commit(args, work, settings_in, prepare)


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("wake", __doc__, AT_MOST, AT_LEAST)
    bench.add_argument("--seconds", type=float, default=60, help="length of the sends of a round (default 60)")
    bench.add_argument("--idle", type=float, default=30, help="length of the idle time before (default 30)")
    bench.add_argument("--rounds", type=int, default=2, help="rounds of each side (default 2)")
    bench.add_argument("--rate", type=int, default=RATE, help=f"messages a second (default {RATE})")
    bench.add_argument(
        "--rates", type=numbers, default=RATES, help="rates of the table (default 50,100,200,400)"
    )
    of_a_rate = "length of the sends of a row of the table (default 15)"
    bench.add_argument("--rate-seconds", type=float, default=15, help=of_a_rate)
    bench.add_argument("--against", metavar="COMMIT", help=AGAINST)
    bench.add_argument("--http", type=int, default=HTTP, help=f"agents over HTTP (default {HTTP})")
    bench.add_argument("--mcp", type=int, default=MCP, help=f"agents over MCP (default {MCP})")
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
