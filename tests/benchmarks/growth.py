"""How cost grows: with events per second, and with jobs known.

Runs the whole stack on free ports. First at one size and rising rates, then at one rate and a registry that
grows; each row says how long the micro-batches took, how late the ledger was, how much of a core and how much
memory gateway and streams used. `--plot FILE` draws it.

    ./trunkline bench growth --rates 50,200,500,1000 --jobs 1000,10000,100000,1000000 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from connectors.local_stack import LocalStack, free_port
from connectors.local_stack.part_plan import GATEWAY, STREAMS
from schemas.ledger import LEDGER
from schemas.sealing import load_keyring
from schemas.settings import (
    AgentMcpSettings,
    DashboardSettings,
    GatewaySettings,
    KafkaSettings,
    MqttSettings,
    Settings,
)
from tests.benchmarks.endurance import BatchTimes, Load, quantile
from tests.benchmarks.event_load import fill, registrations
from tests.benchmarks.freshness import commits
from tests.benchmarks.stack_figures import memory_mb
from tests.faults.test_agreement import end_offsets, look_after, views_are_at

WARM_S = 30
SETTLED_WITHIN_S = 900
FIRST_OF_LOADS = 10_000_000


def cpu_seconds(stack: LocalStack) -> dict[str, float]:
    """What each part's processes have used so far."""
    found = {}
    for name, part in stack.parts.items():
        if part.pid is not None:
            process = psutil.Process(part.pid)
            times = [one.cpu_times() for one in [process, *process.children(recursive=True)]]
            found[name] = sum(one.user + one.system for one in times)
    return found


def wait_settled(stack: LocalStack, settings: Settings) -> None:
    """Wait until ledger and views are at the log's end."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while not views_are_at(settings, end_offsets(settings)):
        look_after(stack, 0.5)
        if time.monotonic() > deadline:
            raise SystemExit(f"growth: not settled within {SETTLED_WITHIN_S} s")


def ledger_ages(settings: Settings, since: float) -> list[float]:
    """Seconds from Kafka's append time to the commit, of what was committed since a moment."""
    import pyarrow.parquet as parquet

    found: list[float] = []
    for moment, files in commits(settings.table_path(LEDGER)):
        for file in files if moment >= since else ():
            logged = parquet.read_table(file, columns=["logged_at"], partitioning=None)["logged_at"]
            found += [moment - at.timestamp() for at in logged.to_pylist()]
    return found


def measured(stack: LocalStack, settings: Settings, rate: int, seconds: int, first: int) -> dict[str, Any]:
    """A load at `rate`, and what it cost in its second half."""
    times, load = BatchTimes(Path(settings.checkpoints_root) / "settle_events"), Load(settings, rate, first)
    times.start()
    load.start()
    look_after(stack, seconds / 2)
    half, clock, before, known = time.time(), time.monotonic(), cpu_seconds(stack), set(times.took_ms)
    look_after(stack, seconds / 2)
    took_s, after = time.monotonic() - clock, cpu_seconds(stack)
    batches = [ms for batch, ms in times.took_ms.items() if batch not in known]
    memory = memory_mb(stack)
    load.stop.set()
    times.stop.set()
    load.join(30)
    if load.failure is not None:
        raise SystemExit(f"growth: the load ended: {load.failure}")
    ages = ledger_ages(settings, half)
    return {
        "batch_median_ms": round(statistics.median(batches)),
        "batch_p95_ms": round(quantile(batches, 0.95)),
        "ledger_p50_s": round(quantile(ages, 0.5), 2),
        "ledger_p95_s": round(quantile(ages, 0.95), 2),
        **{f"{name}_cores": round((after[name] - before[name]) / took_s, 2) for name in (GATEWAY, STREAMS)},
        **{f"{name}_mb": round(memory[name]) for name in (GATEWAY, STREAMS)},
    }


def measure(settings: Settings, rates: list[int], sizes: list[int], rate: int, seconds: int) -> dict[str, Any]:
    """All rows."""
    found: dict[str, Any] = {"rates": [], "jobs": []}
    with LocalStack(settings) as stack:
        first, known = FIRST_OF_LOADS, 0
        measured(stack, settings, rate, WARM_S, first)
        for one in rates:
            first += 1_000_000
            row = {"events_per_s": one, **measured(stack, settings, one, seconds, first)}
            found["rates"].append(row)
            print(f"growth: {row}", file=sys.stderr)
            wait_settled(stack, settings)
        for size in sizes:
            kafka = settings.kafka
            fill(
                kafka.bootstrap_servers,
                kafka.topic,
                registrations(size - known, load_keyring(settings), first=known),
            )
            known = size
            wait_settled(stack, settings)
            first += 1_000_000
            row = {"jobs": size, "events_per_s": rate, **measured(stack, settings, rate, seconds, first)}
            found["jobs"].append(row)
            print(f"growth: {row}", file=sys.stderr)
    return found


def draw(found: dict[str, Any], file: Path) -> None:
    """Two plots: over the rate, over the jobs known."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, rows, by, label in zip(
        axes,
        (found["rates"], found["jobs"]),
        ("events_per_s", "jobs"),
        ("events per second", "jobs known"),
        strict=True,
    ):
        for name, text in (("ledger_p50_s", "ledger p50"), ("ledger_p95_s", "ledger p95")):
            axis.plot([row[by] for row in rows], [row[name] for row in rows], marker="o", label=text)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds from Kafka to the ledger")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def numbers(text: str) -> list[int]:
    """A list such as `50,200`."""
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    parser = argparse.ArgumentParser(prog="trunkline bench growth", description=__doc__)
    parser.add_argument("--rates", type=numbers, default=[50, 200, 500, 1000], help="events a second, in turn")
    parser.add_argument("--jobs", type=numbers, default=[1_000, 10_000, 100_000], help="jobs known, rising")
    parser.add_argument("--rate", type=int, default=200, help="events a second while the jobs grow")
    parser.add_argument("--seconds", type=int, default=40, help="length of each load (default 40)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it there, as SVG")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trunkline-growth-") as work:
        settings = Settings(
            data_dir=Path(work) / "data",
            kafka=KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"),
            mqtt=MqttSettings(port=free_port()),
            gateway=GatewaySettings(port=free_port()),
            dashboard=DashboardSettings(port=free_port()),
            agent_mcp=AgentMcpSettings(port=free_port()),
        )
        result = measure(settings, args.rates, args.jobs, args.rate, args.seconds)
    if args.plot is not None:
        draw(result, args.plot)
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
