"""How cost grows: with events per second, with jobs known, with doors in use.

Each of the three on a stack of its own on free ports. First rising rates; then one rate and a registry that
grows, where a row says how many jobs there were when it was measured, the load's own included; then one rate
and ten messages a second at one door more in each row. A row says how long the micro-batches took, how late the
ledger was, how much of a core and how much memory gateway and streams used, and which rate was reached.
`batch_ratio` is the median micro-batch with 1,000,000 jobs in proportion to that with 1,000. Its limit counts
where both were measured: a missed one is in `not_held`, and the exit code is 1. `--plot FILE` draws all rows.

    ./trunkline bench growth --rates 50,200,500,1000 --jobs 1000,10000,100000,1000000 --json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
from deltalake import DeltaTable

from connectors.programs.local_stack import LocalStack
from connectors.programs.local_stack.part_plan import GATEWAY, STREAMS
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.tables.ledger import LEDGER
from tests.benchmarks.bench_report import Bench, judged, numbers, quantile
from tests.benchmarks.door_load import DOORS, DoorLoads
from tests.benchmarks.endurance import BatchTimes, Load
from tests.benchmarks.event_load import fill, jobs_for, registrations
from tests.benchmarks.freshness_moments import commits
from tests.benchmarks.process_times import STREAMS_JVM, STREAMS_PYTHON, stack_s
from tests.benchmarks.stack_figures import memory_mb
from tests.faults.test_agreement import end_offsets, look_after, views_are_at
from tests.own_settings import stack_settings

WARM_S = 30
WARM_RATE = 20
# So much longer the load lasts than what is measured of it.
MARGIN_S = 10
DOOR_RATE = 10.0
SETTLED_WITHIN_S = 1800
FIRST_OF_LOADS = 10_000_000
FEW_JOBS, MANY_JOBS = 1_000, 1_000_000
AT_MOST = {"batch_ratio": 1.2}


def gateway_lag(settings: Settings) -> int:
    """How many records the gateway has not folded."""
    answer = httpx.get(f"{settings.gateway_url}/readyz", timeout=30, trust_env=False).raise_for_status()
    return sum(answer.json()["lag"].values())


def wait_settled(stack: LocalStack, settings: Settings) -> None:
    """Wait until ledger, views and the gateway are at the log's end."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while not views_are_at(settings, end_offsets(settings)) or gateway_lag(settings):
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


def bytes_per_record(settings: Settings) -> dict[str, int]:
    """Return the mean size of a record in Kafka's log and in the ledger's live files, over all records."""
    topic = settings.kafka.topic
    logged = sum(end_offsets(settings).values())
    log = sum(file.stat().st_size for file in settings.data_path.glob(f"kafka/**/{topic}-*/*.log"))
    files = pa.table(DeltaTable(settings.table_path(LEDGER)).get_add_actions(flatten=True))
    rows, size = (sum(files[name].to_pylist()) for name in ("num_records", "size_bytes"))
    return {"log_bytes_per_record": round(log / logged), "ledger_bytes_per_record": round(size / rows)}


def jobs_known(settings: Settings) -> int:
    """How many jobs the registry has."""
    path = settings.table_path(REGISTRY_JOBS)
    return DeltaTable(path).count() if DeltaTable.is_deltatable(path) else 0


def measured(
    stack: LocalStack, settings: Settings, rate: int, seconds: int, first: int, doors: Sequence[str] = ()
) -> dict[str, Any]:
    """A load at `rate`, and what it cost in its second half."""
    # It outlasts what is measured, and registers its jobs before that.
    load = Load(settings, rate, first, round_s=seconds + MARGIN_S, rounds=1)
    times = BatchTimes(settings.state_path / "checkpoint")
    with DoorLoads(settings, list(doors), DOOR_RATE) as door_loads:
        times.start()
        load.start()
        look_after(stack, seconds / 2)
        half, clock, before, known = time.time(), time.monotonic(), stack_s(settings), set(times.took_ms)
        jobs, sent, told = jobs_known(settings), load.sent, sum(door_loads.sent.values())
        look_after(stack, seconds / 2)
        took_s, after = time.monotonic() - clock, stack_s(settings)
        sent, told = load.sent - sent, sum(door_loads.sent.values()) - told
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    batches = [ms for batch, ms in times.took_ms.items() if batch not in known]
    memory = memory_mb(stack)
    load.stop.set()
    times.stop.set()
    load.join(30)
    for failure in (load.failure, door_loads.failure):
        if failure is not None:
            raise SystemExit(f"growth: the load ended: {failure}")
    ages = ledger_ages(settings, half)
    return {
        "jobs": jobs,
        "reached_per_s": round(sent / took_s, 1),
        "messages_per_s": round(told / took_s, 1),
        "batches": len(batches),
        "batch_median_ms": _rounded(batches, 0.5, 0),
        "batch_p95_ms": _rounded(batches, 0.95, 0),
        "ledger_p50_s": _rounded(ages, 0.5, 2),
        "ledger_p95_s": _rounded(ages, 0.95, 2),
        f"{GATEWAY}_cores": round(used[GATEWAY] / took_s, 2),
        f"{STREAMS}_cores": round((used[STREAMS_JVM] + used[STREAMS_PYTHON]) / took_s, 2),
        **{f"{name}_mb": round(memory[name]) for name in (GATEWAY, STREAMS)},
        **bytes_per_record(settings),
    }


def _rounded(values: Sequence[float], share: float, digits: int) -> float | None:
    """One quantile; None where no micro-batch ended in the time."""
    return round(quantile(values, share), digits or None) if values else None


def say(row: dict[str, Any]) -> dict[str, Any]:
    """Tell a row on stderr, and return it."""
    print(f"growth: {row}", file=sys.stderr)
    return row


def measure_rates(settings: Settings, rates: list[int], seconds: int) -> list[dict[str, Any]]:
    """A row for each rate."""
    rows: list[dict[str, Any]] = []
    with LocalStack(settings) as stack:
        measured(stack, settings, min(rates, default=1), WARM_S, FIRST_OF_LOADS)
        for number, rate in enumerate(rates, 1):
            wait_settled(stack, settings)
            row = measured(stack, settings, rate, seconds, FIRST_OF_LOADS + number * 1_000_000)
            rows.append(say({"events_per_s": rate, **row}))
    return rows


def measure_jobs(settings: Settings, sizes: list[int], rate: int, seconds: int) -> list[dict[str, Any]]:
    """A row for each size of the registry, as near as the load's own jobs let it come."""
    rows: list[dict[str, Any]] = []
    with LocalStack(settings) as stack:
        measured(stack, settings, WARM_RATE, WARM_S, FIRST_OF_LOADS)
        added, own = 0, jobs_for(rate * (seconds + MARGIN_S))
        for number, size in enumerate(sizes, 1):
            wait_settled(stack, settings)
            missing = max(0, size - jobs_known(settings) - own)
            fill(settings, registrations(missing, load_keyring(settings), first=added))
            added += missing
            wait_settled(stack, settings)
            row = measured(stack, settings, rate, seconds, FIRST_OF_LOADS + number * 1_000_000)
            rows.append(say({"wanted_jobs": size, "events_per_s": rate, **row}))
    return rows


def measure_doors(settings: Settings, rate: int, seconds: int) -> list[dict[str, Any]]:
    """A row for the log alone, and for each door more."""
    rows: list[dict[str, Any]] = []
    with LocalStack(settings) as stack:
        measured(stack, settings, rate, WARM_S, FIRST_OF_LOADS)
        for number in range(len(DOORS) + 1):
            wait_settled(stack, settings)
            doors = list(DOORS)[:number]
            row = measured(stack, settings, rate, seconds, FIRST_OF_LOADS + (number + 1) * 1_000_000, doors)
            rows.append(say({"doors": number, "names": doors, "events_per_s": rate, **row}))
    return rows


def draw(found: dict[str, Any], file: Path) -> None:
    """A plot for each axis: how late the ledger was."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    axes_of = (
        ("rates", "events_per_s", "events per second", "log"),
        ("jobs", "jobs", "jobs known", "log"),
        ("doors", "doors", "doors in use beside the log", "linear"),
    )
    figure, axes = pyplot.subplots(1, len(axes_of), figsize=(12, 3.2), sharey=True)
    for axis, (rows, by, label, scale) in zip(axes, axes_of, strict=True):
        for name, text in (("ledger_p50_s", "ledger p50"), ("ledger_p95_s", "ledger p95")):
            shown = [(row[by], row[name]) for row in found[rows] if row[name] is not None]
            axis.plot([x for x, _ in shown], [y for _, y in shown], marker="o", label=text)
        axis.set_xscale(scale)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)  # after all are drawn: it ends the shared axis' fitting itself to them
    axes[0].set_ylabel("seconds from Kafka to the ledger")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure along each axis, on a stack of its own: leftovers of one would be part of the next one's cost."""
    rates, jobs, doors = (stack_settings(work / axis) for axis in ("rates", "jobs", "doors"))
    result: dict[str, Any] = {
        "rates": measure_rates(rates, args.rates, args.seconds) if args.rates else [],
        "jobs": measure_jobs(jobs, args.jobs, args.rate, args.seconds) if args.jobs else [],
        "doors": [] if args.no_doors else measure_doors(doors, args.rate, args.seconds),
    }
    if args.plot is not None:
        draw(result, args.plot)
    return {**result, **batch_ratio(result["jobs"])}


def batch_ratio(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratio of the micro-batches with many jobs to those with few, and whether its limit is held.

    Nothing is returned if one of both was not measured.
    """
    medians = {row["wanted_jobs"]: row["batch_median_ms"] for row in rows}
    if not {FEW_JOBS, MANY_JOBS} <= medians.keys():
        return {}
    few, many = medians[FEW_JOBS], medians[MANY_JOBS]
    found = {"batch_ratio": round(many / few, 3) if few and many else None}
    return {**found, **judged(found, AT_MOST)}


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    sizes = [FEW_JOBS, 10_000, 100_000, MANY_JOBS]
    bench = Bench("growth", __doc__)
    bench.add_argument("--rates", type=numbers, default=[50, 200, 500, 1000], help="events a second, in turn")
    bench.add_argument("--jobs", type=numbers, default=sizes, help="jobs known, rising")
    bench.add_argument("--no-doors", action="store_true", help="leave the doors out")
    bench.add_argument("--rate", type=int, default=200, help="events a second while jobs and doors grow")
    bench.add_argument("--seconds", type=int, default=40, help="length of each load (default 40)")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw it there, as SVG")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
