"""The cost of one MERGE of a micro-batch, alone: with shelves, and into a table that is one shelf.

Each merge changes 300 of the 500 newest jobs and adds 40, as half a second of load does. Prints the median
processor time and the bytes written, for jobs and their entries.

    ./trunkline bench view_merge_cost --known 1000,100000
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
from pathlib import Path
from typing import Any

from jobs.views import view_tables
from jobs.views.view_changes import Key, RowChange
from jobs.views.view_tables import ViewTable
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.kinds import STREAM_ENTRIES
from tests.benchmarks.bench_report import Bench
from tests.benchmarks.view_forms import known_jobs

HOT, CHANGED, ADDED = 500, 300, 40


def processor_s() -> float:
    """Processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def stored_bytes(folder: Path) -> int:
    """Bytes of all data files, also of those that were replaced."""
    return sum(file.stat().st_size for file in folder.glob("**/*.parquet") if "_delta_log" not in file.parts)


def job_of(key: Key) -> str:
    """The id of the job that a row of either table belongs to."""
    return key[1] if len(key) > 1 else key[0]


def measure(folder: Path, table: str, known: int, merges: int) -> dict[str, Any]:
    """Fill a table, then merge."""
    rows = known_jobs(known + merges * ADDED)[table]
    jobs = sorted({job_of(key) for key in rows})
    opened = ViewTable(str(folder), table, folder.with_name(f"{table}-index"))
    first = set(jobs[:known])
    opened.apply({key: change for key, change in rows.items() if job_of(key) in first})
    draw, costs, written = random.Random(1), [], []
    for number in range(1, merges + 1):
        end = known + number * ADDED
        changed = {*draw.sample(jobs[end - HOT : end - ADDED], CHANGED), *jobs[end - ADDED : end]}
        batch = {
            key: RowChange(0, number, change.row)
            for key, change in rows.items()
            # An event writes the entry `progress` alone.
            if job_of(key) in changed and (job_of(key) >= jobs[end - ADDED] or key[-1] != "job")
        }
        spent, size = processor_s(), stored_bytes(folder)
        opened.apply(batch)
        costs.append(processor_s() - spent)
        written.append(stored_bytes(folder) - size)
    return {
        "cpu_ms": round(statistics.median(costs) * 1000),
        "written_kb": round(statistics.median(written) / 1000),
    }


def measure_all(args: argparse.Namespace, work: Path) -> None:
    """Measure each combination and print a line of JSON for it."""
    layouts = {"shelves": view_tables.SHELF_ROWS, "one shelf": 10**9}
    for known in map(int, args.known.split(",")):
        for name, shelf_rows in layouts.items():
            view_tables.SHELF_ROWS = shelf_rows  # type: ignore[misc]
            found = {
                table: measure(work / f"{known}-{name}" / table, table, known, args.merges)
                for table in (REGISTRY_JOBS, STREAM_ENTRIES)
            }
            print(json.dumps({"known": known, "layout": name, **found}), flush=True)


def main() -> int:
    """Run the benchmark. The output is JSON with and without `--json`."""
    bench = Bench("view_merge_cost", __doc__)
    bench.add_argument("--known", default="1000,100000", help="jobs that the tables hold already")
    bench.add_argument("--merges", type=int, default=20)
    return bench.run(measure_all)


if __name__ == "__main__":
    raise SystemExit(main())
