"""The agents' library on a fresh machine, with each Python of this one: sizes, import and first answers.

Builds the wheel, installs it into new virtual environments, and lets the first agent of the docs answer to a
gateway at the other end of a virtual cable, without the checkout. The cable needs root and iproute2; `is_apart`
is false where the agent ran on this machine instead.

    ./trunkline bench agent_wheel --json
    ./trunkline bench agent_wheel --no-stack        sizes and import alone
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from connectors.cli.stack.build_command import build_agent
from connectors.programs.local_stack import LocalStack
from tests.agent_hosts import RUNS, AgentHost, make_host, pythons
from tests.benchmarks.bench_report import Bench, teller
from tests.benchmarks.bench_stack import operator_client
from tests.first_agents import first_round_trips
from tests.network_namespaces import Machine, machine_apart
from tests.own_settings import stack_settings

# The largest of all Pythons.
AT_MOST = {"core_bytes": 10_000_000, "mqtt_bytes": 15_000_000, "import_cpu_ms": 150}
PARTS = ("kafka", "gateway")

_say = teller("agent_wheel")


def installed(version: str, wheel: Path, work: Path, runs: int) -> tuple[AgentHost, dict[str, Any]]:
    """Install the wheel for one Python; return the core's environment, and sizes and times of both."""
    _say(f"Python {version}: install")
    core = make_host(pythons()[version], work / version, wheel)
    mqtt = make_host(pythons()[version], work / f"{version}-mqtt", wheel, ["mqtt"])
    wall_ms, cpu_ms = core.import_ms(runs)
    figures = {
        "wheel_bytes": wheel.stat().st_size,
        "core_bytes": core.installed_bytes(),
        "mqtt_bytes": mqtt.installed_bytes(),
        "import_ms": round(wall_ms, 1),
        "import_cpu_ms": round(cpu_ms, 1),
    }
    return core, figures


@contextmanager
def served(work: Path) -> Iterator[tuple[Machine, httpx.Client]]:
    """Run Kafka and a gateway; yield a machine that reaches the gateway, and the operator's client."""
    settings = stack_settings(work / "data")
    _say("start Kafka and a gateway")
    with (
        LocalStack(settings, parts=PARTS),
        machine_apart(settings.gateway.port) as machine,
        operator_client(settings) as operator,
    ):
        yield machine, operator


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Build, install and run with each Python; return the figures of each and the largest of all."""
    wheel = Path(build_agent(work / "dist")[0].path)
    found = {version: installed(version, wheel, work, args.runs) for version in sorted(pythons())}
    figures = {version: one for version, (_, one) in found.items()}
    result: dict[str, Any] = {
        "pythons": figures,
        **{name: max(one[name] for one in figures.values()) for name in AT_MOST},
    }
    if args.no_stack:
        return result
    with served(work) as (machine, operator):
        result["is_apart"] = machine.is_apart
        for version, (host, one) in found.items():
            _say(f"Python {version}: first answers")
            name = f"echo-{version.replace('.', '-')}"
            seen = first_round_trips(host, machine, operator, name, work / name)
            one.update(first_answer_ms=seen.first_ms, round_trip_ms=seen.next_ms)
    return result


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("agent_wheel", __doc__, AT_MOST)
    bench.add_argument(
        "--runs", type=int, default=RUNS, metavar="N", help=f"imports to measure (default {RUNS})"
    )
    bench.add_argument("--no-stack", action="store_true", help="leave out the agent that answers")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
