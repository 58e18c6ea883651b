"""The cost of the idle stack: time until ready, resident memory, share of a core, and how fast help comes.

Starts the whole stack below a temporary directory on free ports, leaves it idle, measures, stops it.

    ./trunkline bench footprint --json
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

from connectors.local_stack.child_process import marked_processes
from schemas.settings.settings import PROJECT_ROOT, Settings, settings_environment
from tests.benchmarks.bench_report import Bench
from tests.own_settings import stack_settings

WRAPPER = str(PROJECT_ROOT / "trunkline")


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """The CPU time that they have used together."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def measure(settings: Settings, idle_s: int) -> dict[str, Any]:
    """Start, wait, measure, stop."""
    environment = os.environ | settings_environment(settings)
    began = time.monotonic()
    subprocess.run([WRAPPER, "up"], env=environment, check=True, stdout=sys.stderr)
    ready_s = time.monotonic() - began
    try:
        time.sleep(15)  # what the start left to do
        processes = marked_processes(str(settings.data_path))
        before, clock = cpu_seconds(processes), time.monotonic()
        time.sleep(idle_s)
        processes = [process for process in processes if process.is_running()]
        used = (cpu_seconds(processes) - before) / (time.monotonic() - clock)
        return {
            "ready_s": round(ready_s, 1),
            # Pages that two processes share count twice.
            "rss_mb": round(sum(process.memory_info().rss for process in processes) / 1e6),
            "cpu_percent_of_a_core": round(used * 100, 1),
            "processes": len(processes),
        }
    finally:
        subprocess.run([WRAPPER, "down"], env=environment, check=True, stdout=sys.stderr)


def help_seconds(runs: int = 11) -> float:
    """Median wall time of `./trunkline --help`."""
    times = []
    for _ in range(runs):
        began = time.monotonic()
        subprocess.run([WRAPPER, "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.monotonic() - began)
    return round(statistics.median(times), 3)


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("footprint", __doc__)
    bench.add_argument("--idle", type=int, default=40, metavar="S", help="seconds of idleness (default 40)")
    return bench.run(
        lambda args, work: {**measure(stack_settings(work / "data"), args.idle), "help_s": help_seconds()}
    )


if __name__ == "__main__":
    sys.exit(main())
