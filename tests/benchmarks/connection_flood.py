"""Floods of connections at the gateway's listeners: what they cost the clients that behave.

Starts Kafka and a gateway with its default budgets on free ports. Clients of hub, agent MCP and dashboard send
requests, in turns without and with an attack: connections that send nothing, heads and bodies that never end,
half of the bodies at the hub with a worker's token, from several processes. The result has the requests of
these clients, how many failed, their p50 and p99, and by how many bytes the gateway's log grew.

    ./trunkline bench connection_flood --connections 20000 --json
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from connectors.programs.local_stack import LocalStack
from connectors.programs.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import GatewaySettings, Settings
from tests.agent_signatures import signed_headers
from tests.benchmarks.bench_report import Bench, quantile, teller
from tests.benchmarks.bench_stack import operator_client
from tests.broker_processes import LOOPBACK
from tests.connection_flood import Flood, flooding
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.mcp_tools.conftest import Agent
from tests.connectors.doors.mcp_tools.signed_calls import ACCEPT, call_body
from tests.own_settings import stack_settings
from trunkline_agent.mcp.signing import load_private_key

TIMEOUT_S = 10.0
PAUSE_S = 0.005

say = teller("connection_flood")


class Window:
    """The results of the clients, with the attack or without it."""

    def __init__(self) -> None:
        self.took_ms: list[float] = []
        self.health_ms: list[float] = []
        self.failures: Counter[str] = Counter()
        self.log_bytes = 0

    def figures(self) -> dict[str, Any]:
        """The figures for the result."""
        return {
            "requests": len(self.took_ms) + self.failures.total(),
            "failures": self.failures.total(),
            "p50_ms": round(quantile(self.took_ms, 0.5), 1) if self.took_ms else None,
            "p99_ms": round(quantile(self.took_ms, 0.99), 1) if self.took_ms else None,
            "healthz_answers": len(self.health_ms),
            "healthz_slowest_ms": round(max(self.health_ms), 1) if self.health_ms else None,
            "log_growth_bytes": self.log_bytes,
        }


class Clients:
    """Clients of all listeners: some keep a connection, some open a new one for each request."""

    def __init__(self, settings: Settings, agent: Agent, stack: ExitStack) -> None:
        token = settings.operator_token_file.read_text().strip()
        bearer = {"Authorization": f"Bearer {token}"}
        key = load_private_key(agent.key_path.read_bytes())
        page = f"http://{LOOPBACK}:{settings.dashboard.port}"
        mcp = f"http://{LOOPBACK}:{settings.agent_mcp.port}/mcp"
        kept = stack.enter_context(httpx.Client(timeout=TIMEOUT_S, trust_env=False))

        def call(client: Any) -> httpx.Response:
            body = call_body("discover_agents")
            headers = ACCEPT | signed_headers(agent.name, key, body)
            return client.post(mcp, content=body, headers=headers)  # type: ignore[no-any-return]

        def new(ask: Callable[[Any], httpx.Response]) -> httpx.Response:
            with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
                return ask(client)

        agents = f"{settings.gateway_url}/api/hub/agents"
        self.health = "hub, health"
        self.asks: dict[str, Callable[[], httpx.Response]] = {
            "hub, kept": lambda: kept.get(agents, headers=bearer),
            "hub, new": lambda: new(lambda client: client.get(agents, headers=bearer)),
            self.health: lambda: new(lambda client: client.get(f"{settings.gateway_url}/healthz")),
            "agent MCP, kept": lambda: call(kept),
            "agent MCP, new": lambda: new(call),
            "dashboard, kept": lambda: kept.get(f"{page}/api/snapshot", headers=bearer),
            "dashboard, new": lambda: new(lambda one: one.post(f"{page}/api/login", json={"token": token})),
        }

    def ask(self, window: Window, seconds: float) -> None:
        """Send requests in turns for so long, and note what came of each."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name, ask in self.asks.items():
                began = time.monotonic()
                try:
                    ask().raise_for_status()
                except httpx.HTTPError as error:
                    window.failures[f"{name}: {type(error).__name__}"] += 1
                else:
                    taken_ms = (time.monotonic() - began) * 1000
                    window.took_ms.append(taken_ms)
                    if name == self.health:
                        window.health_ms.append(taken_ms)
                time.sleep(PAUSE_S)


def floods_of(settings: Settings, connections: int, token: str) -> list[Flood]:
    """The attack: all kinds at all listeners, and bodies with a token at the hub."""
    ports = {
        "/api/hub/messages": settings.gateway.port,
        "/mcp": settings.agent_mcp.port,
        "/api/login": settings.dashboard.port,
    }
    share = max(1, connections // 10)
    found = [
        Flood(port, kind, share, path) for path, port in ports.items() for kind in ("silent", "head", "body")
    ]
    return [*found, Flood(settings.gateway.port, "body", share, "/api/hub/messages", token)]


def cut_by_reason(settings: Settings) -> dict[str, int]:
    """How many connections the gateway has ended, by reason."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{settings.gateway_url}/metrics", trust_env=False).text.splitlines():
        if line.startswith("trunkline_connections_cut_total{"):
            found[line.partition('reason="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return dict(found)


@contextmanager
def log_growth(path: Path, window: Window) -> Iterator[None]:
    """Add to the window what the file has grown by, in bytes."""
    before = path.stat().st_size
    yield
    window.log_bytes += path.stat().st_size - before


def measure(settings: Settings, args: argparse.Namespace) -> dict[str, Any]:
    """Start the stack, and measure in turns without and with the attack."""
    calm, attacked, opened = Window(), Window(), 0
    with LocalStack(settings, parts=(KAFKA, GATEWAY)) as stack, ExitStack() as held:
        # Only now: the gateway is to raise its own limit. The attackers get this one.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        settings, log_path = stack.settings, stack[GATEWAY].log_path
        with operator_client(settings) as operator:
            worker = add_principal(operator, "attacker", "worker")
            agent = Agent("flood-client", settings.data_path).joined(operator)
        clients = Clients(settings, agent, held)
        clients.ask(Window(), args.seconds / 2)
        floods = floods_of(settings, args.connections, worker)
        for number in range(args.rounds):
            with log_growth(log_path, calm):
                clients.ask(calm, args.seconds)
            with log_growth(log_path, attacked), flooding(floods, args.processes) as counted:
                clients.ask(attacked, args.seconds)
            opened += sum(one["opened"] for one in counted)
            say(f"round {number + 1}: {json.dumps(attacked.figures())}")
        cut = cut_by_reason(settings)
    return {
        "connections": sum(flood.count for flood in floods),
        "processes": args.processes,
        "budgets": {
            "anonymous": settings.gateway.anonymous_connections,
            "authenticated": settings.gateway.connections,
        },
        "without_attack": calm.figures(),
        "with_attack": attacked.figures(),
        "p99_ratio": round(quantile(attacked.took_ms, 0.99) / quantile(calm.took_ms, 0.99), 2),
        "opened_by_attackers": opened,
        "cut_by_reason": cut,
        "errors": sorted(calm.failures | attacked.failures),
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    defaults = GatewaySettings()
    most = 2 * (defaults.anonymous_connections + defaults.connections)
    of_all = f"at once, of all attackers; 10 or more (default {most}, twice the budgets)"
    bench = Bench("connection_flood", __doc__)
    bench.add_argument("--connections", type=int, default=most, metavar="N", help=of_all)
    bench.add_argument("--processes", type=int, default=3, metavar="N", help="attackers (default 3)")
    bench.add_argument("--rounds", type=int, default=3, metavar="N", help="without and with (default 3)")
    bench.add_argument("--seconds", type=float, default=10, metavar="S", help="of each part (default 10)")
    return bench.run(lambda args, work: measure(stack_settings(work / "data"), args))


if __name__ == "__main__":
    sys.exit(main())
