"""How fast agents exchange messages over MCP, next to the same tools on SQLite.

30 agents, all at once: each kind of call alone (`kinds`), then sends, reads, marks, looks and words about
themselves mixed, for about 30 s. All calls are signed before the clock starts. Kafka and gateway alone, in
turns with the peer, three rounds, of which the medians count. `us_per_op` are the microseconds of processor
time that each program uses for a call, of which `load` is this program; `peer_...` are those of the peer. Kafka
does not sync each record to disk here; SQLite does. Limits that were not held are in `not_held`, and the exit
code is 1.

    ./trunkline bench mcp --json

With `--against COMMIT` the gateway of that commit takes the turns of the peer (`before_...`), each with a Kafka
of its own. `ratio_before` compares the mixed calls.

With `--through library` it measures something else: the processor time of a client per call, through the
library and by a hand-written client, in turns.

    ./trunkline bench mcp --through library --seconds 4
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from connectors.programs.local_stack import LocalStack, free_port
from connectors.programs.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import DashboardSettings, Settings
from tests.benchmarks import mcp_library
from tests.benchmarks.bench_report import Bench, Figures, in_turns, judged, medians, prefixed, ratios, teller
from tests.benchmarks.bench_stack import (
    AGAINST,
    CheckoutStack,
    Server,
    compared_with_commit,
    operator_client,
    served,
)
from tests.benchmarks.mcp_load import McpAgents, one_round
from tests.broker_processes import LOOPBACK
from tests.own_settings import stack_settings
from trunkline_agent.mcp.signing import load_private_key, new_key_pair

AGENTS = 30
FEW = 8
LIBRARY = "library"
ROUNDS = 3
AT_MOST, AT_LEAST = {"ratio_p99": 0.6, "failed_calls": 0}, {"ratio_ops": 1.5}
PEER = "the same tools on the mcp package's server and SQLite, synchronous=FULL"
Keys = Mapping[str, tuple[bytes, str]]


say = teller("mcp")


@contextmanager
def sqlite_peer(work: Path, keys: Keys) -> Iterator[Server]:
    """Run the peer with the same tools as a child of this process."""
    port, names = free_port(), work / "keys.json"
    names.write_text(json.dumps({name: public for name, (_, public) in keys.items()}))
    module = [sys.executable, "-P", "-m", "tests.benchmarks.mcp_sqlite_peer"]
    with served("sqlite", [*module, str(port), str(work / "db"), str(names)], port, work) as process:
        yield Server(port, {"server": process.pid})


def take_part(settings: Settings, keys: Keys) -> None:
    """Let the agents take part at ours."""
    with operator_client(settings) as operator:
        for name, (_, public) in keys.items():
            body = {"agent_name": name, "public_key": public}
            operator.post("/api/hub/participants", json=body).raise_for_status()


def rounds_at(server: Server, keys: Keys, seconds: float) -> Callable[[], Figures]:
    """Return the function that measures one round at a server that knows the agents."""
    agents = McpAgents(server, {name: load_private_key(private) for name, (private, _) in keys.items()})
    return partial(one_round, agents, len(keys), seconds)


def our_rounds(stack: CheckoutStack, keys: Keys, seconds: float) -> Callable[[], Figures]:
    """Let the agents take part, and return the function that measures one round."""
    take_part(stack.settings, keys)
    return rounds_at(Server(stack.settings.agent_mcp.port, stack.server(GATEWAY, KAFKA).pids), keys, seconds)


def measure(settings: Settings, work: Path, keys: Keys, args: argparse.Namespace) -> Figures:
    """Measure all rounds in turns with the peer."""
    with CheckoutStack(settings, (KAFKA, GATEWAY)) as stack, sqlite_peer(work, keys) as peer:
        ours, theirs = our_rounds(stack, keys, args.seconds), rounds_at(peer, keys, args.seconds)
        found = in_turns(args.rounds, {"ours": ours, "peer": theirs}, say)
    mine, other = (
        medians(rounds) | {"failed_calls": sum(one["failed_calls"] for one in rounds)}
        for rounds in found.values()
    )
    result = {**mine, "peer": PEER, **prefixed("peer", other)}
    pairs = {"ratio_p99": ("p99_ms", "peer_p99_ms"), "ratio_ops": ("ops_per_s", "peer_ops_per_s")}
    return {**result, **ratios(result, pairs)}


def measure_client(settings: Settings, seconds: float) -> Figures:
    """Measure with Kafka and gateway alone the cost of a client through the library beside the control's."""
    keys = {f"agent-{number:02d}": new_key_pair() for number in range(FEW)}
    with LocalStack(settings, parts=(KAFKA, GATEWAY)):
        take_part(settings, keys)
        found = mcp_library.client_cost(f"http://{LOOPBACK}:{settings.agent_mcp.port}", keys, seconds)
    # In turns, so the limit counts with any options.
    return {**found, **judged(found, mcp_library.AT_MOST)}


def settings_in(folder: Path) -> Settings:
    """Return settings of a stack without pages."""
    return stack_settings(folder, dashboard=DashboardSettings(port=0))


def run(args: argparse.Namespace, work: Path) -> Figures:
    """Measure what the options ask for."""
    # Also then nothing is left: the peer is no part of the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.through == LIBRARY:
        return measure_client(settings_in(work / "data"), args.seconds)
    keys = {f"agent-{number:02d}": new_key_pair() for number in range(AGENTS)}
    if args.against is None:
        return measure(settings_in(work / "data"), work, keys, args)
    prepare = partial(our_rounds, keys=keys, seconds=args.seconds)
    return compared_with_commit(args, work, settings_in, prepare, "ops_per_s")


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("mcp", __doc__, AT_MOST, AT_LEAST)
    bench.add_argument("--seconds", type=float, default=30, help="length of the mixed phase (default 30)")
    bench.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each side (default {ROUNDS})")
    bench.add_argument("--against", metavar="COMMIT", help=AGAINST)
    through = "measure instead what a client through the library costs beside the control"
    bench.add_argument("--through", choices=[LIBRARY], help=through)
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
