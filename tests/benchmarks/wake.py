"""How soon a waiting agent has its message in hand, next to the same doors over NATS JetStream.

1,000 agents wait: 900 with `GET /api/hub/messages?wait=30`, which takes the messages, and 100 with the MCP
tool `wait_for_messages`, which then mark them as read. Two gateways, half of the agents at each. First
nothing is sent, and the processor time of the gateways is measured. Then 200 messages a second go to random
agents, and the second gateway is killed in the middle. Its clients go on at the other one. In turns with the
peer, two rounds, of which the medians count.

The time runs from the send of the request that sends the message until the receiver has it, on one clock.
`missed` are acknowledged messages that nobody has in the end, `empty_answers` answers without a message
before the time of the wait. The MCP agents make signed calls with a lean client, because 100 of the official
one would need the processor that they measure. `load_cores` is what the load program uses itself. Kafka does
not sync each record to disk here, the peer does. Limits that were not held are in `not_held`, and the exit
code is 1.

    ./trunkline bench wake --json
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connectors.local_stack import LocalStack, free_port
from connectors.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import DashboardSettings, Settings
from tests.benchmarks.bench_report import Bench, medians, teller
from tests.benchmarks.bench_stack import operator_client
from tests.benchmarks.wake_load import Clients, Door, Plan, Round, one_round
from tests.benchmarks.wake_peer import Peer, peer
from tests.connectors.gateway.hub_access import GatewayProcess, add_principal
from tests.own_settings import stack_settings
from trunkline_agent.mcp.signing import load_private_key, new_key_pair

HTTP, MCP, SENDERS = 900, 100, 20
RATE = 200
AT_MOST = {"ratio_p99": 1.5, "empty_answers": 0, "missed": 0, "idle_cores": 0.05}
# Otherwise the machine was too busy to send at the rate, and the latencies say nothing.
AT_LEAST = {"sends_per_s": 0.975 * RATE}
START_S = 60.0
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


@contextmanager
def second_gateway(settings: Settings, folder: Path) -> Iterator[GatewayProcess]:
    """One more gateway over the same Kafka, on ports of its own."""
    mcp = settings.agent_mcp.model_copy(update={"port": free_port()})
    gateway = GatewayProcess(settings.model_copy(update={"agent_mcp": mcp}), folder)
    try:
        gateway.program.wait_ready(START_S)
        yield gateway
    finally:
        gateway.program.kill()


def our_round(stack: LocalStack, work: Path, clients: Clients, plan: Plan) -> Round:
    """A round at the stack's gateway and a second one, which is killed."""
    settings, pid = stack.settings, stack[GATEWAY].pid
    assert pid is not None
    with second_gateway(settings, work) as other:
        ports = other.settings.gateway.port, other.settings.agent_mcp.port
        doors = [
            Door(settings.gateway.port, settings.agent_mcp.port, pid),
            Door(*ports, other.program.process.pid),
        ]
        return asyncio.run(one_round(doors, clients, plan, other.program.kill))


def peer_round(server: Peer, clients: Clients, plan: Plan) -> Round:
    """A round at two fronts of the peer."""
    with server.front("front-1") as first, server.front("front-2") as second:
        doors = [Door(front.port, front.port, front.pid) for front in (first, second)]
        return asyncio.run(one_round(doors, clients, plan, second.kill))


def told(name: str, number: int, found: Round) -> Round:
    """Report a round on stderr, and return it."""
    say(
        f"{name}, round {number}: in hand after p50 {found.in_hand_p50_ms:.1f} ms, "
        f"p99 {found.in_hand_p99_ms:.1f} ms; {found.empty_answers:.0f} empty, {found.missed:.0f} missed; "
        f"idle {found.idle_cores:.3f}, busy {found.busy_cores:.2f}, load {found.load_cores:.2f} cores; "
        f"{found.sends_per_s:.0f} sends/s"
    )
    return found


def figures(ours: list[Round], theirs: list[Round]) -> dict[str, Any]:
    """The result: medians of the rounds, but the worst of what must not happen at all."""
    mine, other = medians(ours), medians(theirs)
    return {
        "in_hand_p50_ms": round(mine.in_hand_p50_ms, 1),
        "in_hand_p99_ms": round(mine.in_hand_p99_ms, 1),
        "empty_answers": round(sum(one.empty_answers for one in ours)),
        "missed": round(sum(one.missed for one in ours)),
        "idle_cores": round(mine.idle_cores, 3),
        "busy_cores": round(mine.busy_cores, 2),
        "load_cores": round(mine.load_cores, 2),
        "sends_per_s": round(mine.sends_per_s),
        "peer": PEER,
        "peer_p50_ms": round(other.in_hand_p50_ms, 1),
        "peer_p99_ms": round(other.in_hand_p99_ms, 1),
        "peer_empty_answers": round(sum(one.empty_answers for one in theirs)),
        "peer_missed": round(sum(one.missed for one in theirs)),
        "peer_idle_cores": round(other.idle_cores, 3),
        "peer_busy_cores": round(other.busy_cores, 2),
        "peer_sends_per_s": round(other.sends_per_s),
        "ratio_p99": round(mine.in_hand_p99_ms / other.in_hand_p99_ms, 3),
    }


def measure(settings: Settings, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    plan = Plan(args.rate, args.seconds, args.idle)
    ours: list[Round] = []
    theirs: list[Round] = []
    with LocalStack(settings, parts=(KAFKA, GATEWAY)) as stack:
        clients, keys = join(stack.settings, args.http, args.mcp)
        say(f"{len(clients.http)} agents over HTTP and {len(keys)} over MCP have joined")
        with peer(work / "peer", {**clients.http, **clients.senders}, keys) as server:
            for number in range(1, args.rounds + 1):
                ours.append(told("ours", number, our_round(stack, work, clients, plan)))
                theirs.append(told("peer", number, peer_round(server, clients, plan)))
    return {**figures(ours, theirs), "note": NOTE}


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure on a stack without pages."""
    # Also then nothing is left: the second gateway is no part of the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(NOTE)
    settings = stack_settings(work / "data", dashboard=DashboardSettings(port=0))
    return measure(settings, work, args)


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("wake", __doc__, AT_MOST, AT_LEAST)
    bench.add_argument("--seconds", type=float, default=60, help="length of the sends of a round (default 60)")
    bench.add_argument("--idle", type=float, default=30, help="length of the idle time before (default 30)")
    bench.add_argument("--rounds", type=int, default=2, help="rounds of each side (default 2)")
    bench.add_argument("--rate", type=int, default=RATE, help=f"messages a second (default {RATE})")
    bench.add_argument("--http", type=int, default=HTTP, help=f"agents over HTTP (default {HTTP})")
    bench.add_argument("--mcp", type=int, default=MCP, help=f"agents over MCP (default {MCP})")
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
