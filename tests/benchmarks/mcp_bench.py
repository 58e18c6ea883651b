"""How fast agents exchange messages over MCP, next to the same tools on SQLite, or to `mcp-agent-mail`.

30 agents, each with a client of its own, all at once: each writes 5 messages and reads its mailbox, then all
mix sends, reads, marks, looks and words about themselves for 30 s. Kafka and gateway alone, in turns with the
peer, two rounds, of which the medians count. The latencies are those of all calls of both phases, the
operations those of the second. Kafka does not sync each record to disk here; SQLite does. Limits that were not
held beside SQLite are in `not_held`, and the exit code is 1.

The peer `mail` is what others wrote for the same purpose. 30 agents at once are too many for it: calls fail
after 60 s of waiting for a lock of its own, or have no answer. They count with the time that they took, and as
no operations.

    ./trunkline bench mcp --json

With `--through library` it measures something else: the processor time of a client per call, through the
library and by the hand-written client of all other figures, in turns.

    ./trunkline bench mcp --through library --seconds 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from connectors.local_stack import LocalStack, free_port
from connectors.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import DashboardSettings, Settings
from tests.benchmarks import mcp_library, mcp_mail_peer
from tests.benchmarks.bench_report import Bench, medians, not_held, teller
from tests.benchmarks.bench_stack import operator_client, served
from tests.benchmarks.mcp_load import SignedTools, load
from tests.benchmarks.mcp_mail_peer import MailTools
from tests.broker_processes import LOOPBACK
from tests.own_settings import stack_settings
from trunkline_agent.mcp.signing import new_key_pair

AGENTS = 30
FEW = 8
LIBRARY = "library"
ROUNDS = 2
AT_MOST, AT_LEAST = {"ratio_p99": 0.6}, {"ratio_ops": 1.5}
MAIL, SQLITE = "mail", "sqlite"
PEERS = {
    MAIL: f"mcp-agent-mail {mcp_mail_peer.RELEASE}",
    SQLITE: "the same tools on the mcp package's server and SQLite, synchronous=FULL",
}
Keys = Mapping[str, tuple[bytes, str]]


say = teller("mcp")


@dataclass(frozen=True)
class Round:
    """The figures of one round at one server."""

    p50_ms: float
    p99_ms: float
    ops_per_s: float
    failed: int


def one_round(name: str, make: Callable[..., Any], names: list[str], seconds: float) -> Round:
    """Both phases."""
    measured = asyncio.run(load(names, make, seconds))
    took_s = measured.mixed_s
    found = Round(
        measured.quantile_ms(0.5), measured.quantile_ms(0.99), measured.mixed / took_s, len(measured.failed)
    )
    say(f"{name}: p50 {found.p50_ms:.1f} ms, p99 {found.p99_ms:.1f} ms, {found.ops_per_s:.0f} operations/s")
    if measured.failed:
        say(f"{name}: {found.failed} calls failed, the first one with {measured.failed[0][:300]}")
    return found


def signed(url: str, keys: Keys) -> Callable[[aiohttp.ClientSession, str], SignedTools]:
    """Makes the signed tools of an agent."""
    return lambda session, name: SignedTools(session, url, name, keys[name][0])


@contextmanager
def sqlite_peer(work: Path, keys: Keys) -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """The peer with the same tools: how its tools are made, and the names of its agents."""
    port, names = free_port(), work / "keys.json"
    names.write_text(json.dumps({name: public for name, (_, public) in keys.items()}))
    module = [sys.executable, "-P", "-m", "tests.benchmarks.mcp_sqlite_peer"]
    with served("sqlite", [*module, str(port), str(work / "db"), str(names)], port, work):
        yield signed(f"http://{LOOPBACK}:{port}/mcp", keys), list(keys)


@contextmanager
def mail_peer(work: Path, keys: Keys) -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """The peer that others wrote."""
    port, names = free_port(), mcp_mail_peer.NAMES[: len(keys)]
    url = f"http://{LOOPBACK}:{port}/mcp/"

    def make(session: aiohttp.ClientSession, name: str) -> MailTools:
        return MailTools(session, url, name)

    async def register() -> None:
        async with aiohttp.ClientSession() as session:
            await make(session, "").open_project()
            for name in names:
                await make(session, name).register("is measured")

    command, environment = mcp_mail_peer.command(port, work)
    with served("mail", command, port, work, environment):
        asyncio.run(register())
        yield make, names


def take_part(settings: Settings, keys: Keys) -> None:
    """Let the agents take part at ours."""
    with operator_client(settings) as operator:
        for name, (_, public) in keys.items():
            body = {"agent_name": name, "public_key": public}
            operator.post("/api/hub/participants", json=body).raise_for_status()


def measure(settings: Settings, work: Path, seconds: float, peer: str) -> dict[str, Any]:
    """All rounds."""
    keys = {f"agent-{number:02d}": new_key_pair() for number in range(AGENTS)}
    run_peer = {MAIL: mail_peer, SQLITE: sqlite_peer}[peer]
    ours: list[Round] = []
    theirs: list[Round] = []
    door = settings.agent_mcp
    with LocalStack(settings, parts=(KAFKA, GATEWAY)), run_peer(work, keys) as (make, names):
        take_part(settings, keys)
        mine = signed(f"http://{LOOPBACK}:{door.port}/mcp", keys)
        for number in range(1, ROUNDS + 1):
            ours.append(one_round(f"ours, round {number}", mine, list(keys), seconds))
            theirs.append(one_round(f"peer, round {number}", make, names, seconds))
    found, other = medians(ours), medians(theirs)
    if found.failed:
        raise RuntimeError("calls of ours failed")
    return {
        "p50_ms": round(found.p50_ms, 1),
        "p99_ms": round(found.p99_ms, 1),
        "ops_per_s": round(found.ops_per_s),
        "peer": PEERS[peer],
        "peer_p99_ms": round(other.p99_ms, 1),
        "peer_ops_per_s": round(other.ops_per_s, 1),
        "peer_failed_calls": sum(one.failed for one in theirs),
        "ratio_p99": round(found.p99_ms / other.p99_ms, 3),
        "ratio_ops": round(found.ops_per_s / other.ops_per_s, 3) if other.ops_per_s else None,
    }


def measure_client(settings: Settings, seconds: float) -> dict[str, Any]:
    """Kafka and gateway alone: the cost of a client through the library beside that of the control."""
    keys = {f"agent-{number:02d}": new_key_pair() for number in range(FEW)}
    with LocalStack(settings, parts=(KAFKA, GATEWAY)):
        take_part(settings, keys)
        found = mcp_library.client_cost(f"http://{LOOPBACK}:{settings.agent_mcp.port}", keys, seconds)
    # In turns, so the limit counts with any options.
    return {**found, "not_held": not_held(found, mcp_library.AT_MOST)}


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Check that the peer is there, and measure."""
    # Also then nothing is left: the peer is no part of the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.peer == MAIL and not mcp_mail_peer.is_installed():
        raise SystemExit(f"mcp: not installed; {mcp_mail_peer.HOW}")
    settings = stack_settings(work / "data", dashboard=DashboardSettings(port=0))
    if args.through == LIBRARY:
        return measure_client(settings, args.seconds)
    return measure(settings, work, args.seconds, args.peer)


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("mcp", __doc__, AT_MOST, AT_LEAST)
    bench.add_argument("--seconds", type=float, default=30, help="length of the mixed phase (default 30)")
    bench.add_argument("--peer", choices=sorted(PEERS), default=SQLITE, help="which peer (default sqlite)")
    through = "measure instead what a client through the library costs beside the control"
    bench.add_argument("--through", choices=[LIBRARY], help=through)
    return bench.run(run)


if __name__ == "__main__":
    sys.exit(main())
