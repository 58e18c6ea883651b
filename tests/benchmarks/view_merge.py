"""Ways to bring the ledger's changes into the view tables, beside the settling query in one driver.

One settling query runs under a steady load all the time; the forms take turns beside it, for some rounds,
each with tables of its own that hold `--known` jobs. Prints for each turn: seconds from Kafka's append to
the ledger's commit and to the views' commit, and the processor time of the driver (JVM, Python, workers).

    ./trunkline bench view_merge --known 100000 --forms none,delta-rs,commits,spark --rounds 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as parquet
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from connectors.local_stack.spark_command import DELTA_CONF
from jobs import settle_events
from jobs.views.view_tables import open_tables
from schemas.settings.settings import Settings, StorageSettings
from schemas.streams.kinds import STREAM_ENTRIES
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import ViewProgress
from tests.benchmarks.bench_report import Bench, quantile
from tests.benchmarks.bench_stack import filled_topic
from tests.benchmarks.event_load import SteadyLoad, jobs_for
from tests.benchmarks.view_forms import FORMS, known_jobs
from tests.own_settings import stack_settings
from tests.spark_session import start_session

START_S = 180
Quantiles = dict[str, float]


def processor_s() -> float:
    """Processor seconds of this process, its JVM and the workers so far."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            if "kafka.Kafka" not in process.cmdline():
                spent = process.cpu_times()
                total += spent.user + spent.system
    return total


def quantiles(lags: list[float]) -> Quantiles:
    """Median and 95th percentile."""
    lags = lags or [float("nan")]
    return {"p50_s": round(statistics.median(lags), 3), "p95_s": round(quantile(lags, 0.95), 3)}


def landed(settings: Settings, began: float, ended: float) -> list[tuple[int, int, float, float]]:
    """Partition, offset, append and commit time of the ledger rows appended between two moments."""
    table = DeltaTable(settings.table_path(LEDGER))
    found = []
    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        at = action["modification_time"] / 1000
        if not began <= at <= ended + 10:
            continue
        columns = ["partition", "offset", "logged_at"]
        rows = parquet.read_table(Path(settings.table_path(LEDGER), action["path"]), columns=columns)
        for row in rows.to_pylist():
            moment = row["logged_at"].timestamp()
            if began <= moment <= ended:
                found.append((row["partition"], row["offset"], moment, at))
    return found


def view_lags(settings: Settings, rows: list[tuple[int, int, float, float]]) -> list[float]:
    """From append to the commit of `stream_entries` that says it is in the views."""
    commits: dict[int, tuple[list[int], list[float]]] = {}
    for commit in reversed(DeltaTable(settings.table_path(STREAM_ENTRIES)).history()):
        text = commit.get("trunkline") or commit.get("userMetadata")
        for partition, offset in json.loads(text)["offsets"].items() if text else ():
            offsets, times = commits.setdefault(int(partition), ([], []))
            offsets.append(offset)
            times.append(commit["timestamp"] / 1000)
    lags = []
    for partition, offset, moment, _ in rows:
        offsets, times = commits.get(partition, ([], []))
        at = bisect_right(offsets, offset)
        if at < len(offsets):
            lags.append(times[at] - moment)
    return lags


def turn(spark: SparkSession, settings: Settings, own: Settings, form: str, seconds: int) -> dict[str, Any]:
    """Run one form for a while beside the load; measure after a third of it."""
    stop: Callable[[], None] = FORMS[form](spark, own)
    time.sleep(seconds / 3)
    began, spent = time.time(), processor_s()
    time.sleep(seconds * 2 / 3)
    ended, spent = time.time(), processor_s() - spent
    time.sleep(6)
    stop()
    rows = landed(settings, began, ended)
    result: dict[str, Any] = {
        "form": form,
        "records": len(rows),
        "ledger": quantiles([at - moment for _, _, moment, at in rows]),
        "cores": round(spent / (ended - began), 2),
        "load": round(os.getloadavg()[0], 1),
    }
    if form != "none":
        lags = view_lags(own, rows)
        result |= {"views": quantiles(lags), "in_views": len(lags)}
    return result


def wait_for_the_start(query: StreamingQuery) -> None:
    """Wait until the first micro-batches, which hold the registrations, are over. Raises RuntimeError."""
    deadline = time.monotonic() + START_S
    while len([progress for progress in query.recentProgress if progress["numInputRows"]]) < 3:
        if time.monotonic() > deadline or not query.isActive:
            raise RuntimeError(f"the settling query did not start: {query.exception()}")
        time.sleep(0.5)


def own_tables(settings: Settings, work: Path, name: str, known: int) -> Settings:
    """Settings with view tables of their own, which hold `known` jobs, over the same ledger."""
    tables = work / name / "tables"
    tables.mkdir(parents=True)
    (tables / LEDGER).symlink_to(settings.table_path(LEDGER))
    own = settings.model_copy(
        update={"storage": StorageSettings(tables=str(tables), state=work / name / "state")}
    )
    version = DeltaTable(settings.table_path(LEDGER)).version()
    changes = known_jobs(known)
    for table, opened in open_tables(own).items():
        opened.apply(changes.get(table, {}), ViewProgress({}, version))
    return own


def measure(args: argparse.Namespace, work: Path) -> None:
    """All turns, with a line of JSON for each, on a Kafka and a Spark of their own."""
    forms = args.forms.split(",")
    seconds = (args.seconds + 30) * len(forms) * args.rounds + 120
    settings = stack_settings(work / "data")
    with filled_topic(settings, 0, jobs_for(args.rate * seconds)):
        spark = start_session(work, conf=DELTA_CONF | dict(pair.split("=", 1) for pair in args.conf))
        query = settle_events.start(spark, settings)
        with SteadyLoad(settings, args.rate, seconds):
            wait_for_the_start(query)
            time.sleep(args.warm)
            for number in range(args.rounds):
                for form in forms:
                    own = own_tables(settings, work, f"{form}-{number}", args.known)
                    result = {
                        "round": number,
                        "known": args.known,
                        **turn(spark, settings, own, form, args.seconds),
                    }
                    print(json.dumps(result), flush=True)
        query.stop()
        spark.stop()


def main() -> int:
    """Measure and print a line of JSON for each turn, with and without `--json`."""
    bench = Bench("view_merge", __doc__)
    bench.add_argument("--forms", default="none,delta-rs,commits,spark", help=f"of {', '.join(FORMS)}")
    bench.add_argument("--known", type=int, default=1000, help="jobs that the tables hold already")
    bench.add_argument("--rate", type=int, default=500, help="events a second")
    bench.add_argument("--rounds", type=int, default=2)
    bench.add_argument("--seconds", type=int, default=30, help="of each turn; two thirds are measured")
    bench.add_argument("--warm", type=int, default=60, help="seconds of load before the first turn")
    bench.add_argument("--conf", action="append", default=[], help="NAME=VALUE for the Spark session")
    return bench.run(measure)


if __name__ == "__main__":
    raise SystemExit(main())
