"""One way to run the fold, one sink, one file system: its throughput and its latency, for decision 0003.

Latency is from Kafka's append time to the modification time of the commit that holds the record, at a
steady rate; throughput is taken inside the micro-batches that hold events, after a first pass that warms
the JVM. `--all` runs each combination that the decision compares, a process each.

    ./trunkline bench settle_latency --all --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from connectors.local_stack import free_port
from connectors.local_stack.spark_command import DELTA_CONF
from jobs.ledger.ledger_table import prepare_ledger
from jobs.settle_events import read_records, settle_frame, settled_rows
from jobs.settling.once_sink import OnceSink
from schemas.settings.settings import KafkaSettings, Settings, SparkSettings, StorageSettings
from schemas.tables.ledger import LEDGER
from tests.benchmarks.bench_report import Bench, quantile
from tests.benchmarks.bench_stack import filled_topic
from tests.benchmarks.event_load import SteadyLoad, jobs_for
from tests.benchmarks.settle_forms import FORMS, build
from tests.benchmarks.spark_append import SparkAppend
from tests.own_settings import stack_settings
from tests.spark_session import start_session

DEFAULT_FILE_SYSTEM = {"spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem"}
LIMIT_S = 600


def start(
    spark: SparkSession, settings: Settings, args: argparse.Namespace, available_now: bool
) -> StreamingQuery:
    """The query of one combination."""
    records = read_records(spark, settings)
    if args.sink == "files":
        prepare_ledger(settings)
        frame = settle_frame(settled_rows(records, settings), settings)
    else:
        frame = build(args.form, records, settings)
    writer = frame.writeStream.option("checkpointLocation", f"{settings.checkpoints_root}/q")
    if available_now:
        writer = writer.trigger(availableNow=True)
    path = settings.table_path(LEDGER)
    if args.sink == "delta":
        return writer.format("delta").outputMode("append").start(path)
    if args.sink == "spark":
        return writer.foreachBatch(SparkAppend(path)).start()
    sink = OnceSink(path)
    query = writer.foreachBatch(sink).start()
    sink.started(query.id)
    return query


def throughput(spark: SparkSession, settings: Settings, args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Records a second inside the micro-batches but the first, in a cold and in a warm JVM."""
    rates = []
    for number in range(args.passes):
        own = StorageSettings(tables=str(root / f"t{number}"), checkpoints=str(root / f"c{number}"))
        query = start(spark, settings.model_copy(update={"storage": own}), args, True)
        assert query.awaitTermination(LIMIT_S), "a pass took longer than its limit"
        progress = [p for p in query.recentProgress if p["numInputRows"]]
        # The first micro-batch plans the query and holds the registrations: it is not counted.
        progress = progress[1:]
        spent = sum(p["durationMs"]["addBatch"] for p in progress)
        rates.append(sum(p["numInputRows"] for p in progress) / spent * 1000)
    return {"cold_eps": round(rates[0]), "warm_eps": round(statistics.median(rates[1:] or rates))}


def latency(spark: SparkSession, settings: Settings, args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Seconds from append to commit, in the second half of a steady load."""
    own = StorageSettings(tables=str(root / "lt"), checkpoints=str(root / "lc"))
    at = settings.model_copy(update={"storage": own})
    query = start(spark, at, args, False)
    deadline = time.monotonic() + LIMIT_S
    while (query.lastProgress is None or query.lastProgress["numInputRows"]) and time.monotonic() < deadline:
        time.sleep(0.5)
    began = time.time()
    SteadyLoad(settings, args.rate, args.seconds, jobs_for(args.events)).run()
    time.sleep(5)
    batches = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]]
    query.stop()
    table = DeltaTable(at.table_path(LEDGER))
    lags = []
    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        landed = action["modification_time"] / 1000
        if landed < began + args.seconds / 2:
            continue
        part = table.to_pyarrow_dataset().filesystem.open_input_file(action["path"])
        lags += commit_lags(part, landed)
    return {
        "latency_p50_s": round(quantile(lags, 0.5), 3),
        "latency_p95_s": round(quantile(lags, 0.95), 3),
        "batch_p50_ms": statistics.median(batches[-50:]),
    }


def commit_lags(file: Any, landed: float) -> list[float]:
    """How old each row of a Parquet file was when its file was written."""
    column = parquet.read_table(file, columns=["logged_at"])["logged_at"]
    return [landed - moment.timestamp() for moment in column.to_pylist()]


def measure(args: argparse.Namespace, work: Path) -> None:
    """One combination, on a Kafka of its own; or all of them, each in a process of its own."""
    if args.all:
        measure_all(args)
        return
    settings = stack_settings(
        work / "data",
        kafka=KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}", partitions=args.partitions),
        spark=SparkSettings(shuffle_partitions=args.shuffle_partitions),
    )
    # Jobs for both loads, and those that are only known.
    jobs = max(jobs_for(args.events) + jobs_for(args.rate * args.seconds), args.known)
    with filled_topic(settings, args.events, jobs):
        conf = DEFAULT_FILE_SYSTEM if args.file_system == "hadoop" else {}
        if args.sink != "files":
            conf = conf | DELTA_CONF
        spark = start_session(work, args.shuffle_partitions, conf)
        result = {**throughput(spark, settings, args, work), **latency(spark, settings, args, work)}
        spark.stop()
    names = ("form", "sink", "file_system", "partitions", "shuffle_partitions", "known")
    print(json.dumps({**{name: getattr(args, name) for name in names}, **result}), flush=True)


def combinations() -> list[list[str]]:
    """Return the options that decision 0003 compares: each form, then the chosen one with one change each."""
    chosen = ["--form", "packed"]
    return [["--form", form] for form in FORMS] + [
        [*chosen, "--sink", "delta"],
        [*chosen, "--sink", "files"],
        [*chosen, "--file-system", "hadoop"],
        [*chosen, "--known", "100000"],
        ["--form", "blob", "--known", "100000"],
    ]


def measure_all(args: argparse.Namespace) -> None:
    """Measure every combination of the decision."""
    shared = ["--events", str(args.events), "--passes", str(args.passes), "--seconds", str(args.seconds)]
    for combination in combinations():
        command = [sys.executable, "-m", "tests.benchmarks.settle_latency", *combination, *shared]
        subprocess.run(command, check=False)


def main() -> int:
    """Run one combination, or all of them. The output is JSON with and without `--json`."""
    bench = Bench("settle_latency", __doc__)
    bench.add_argument("--form", choices=FORMS, default="packed")
    bench.add_argument("--sink", choices=("spark", "files", "delta"), default="spark")
    bench.add_argument("--file-system", choices=("bare", "hadoop"), default="bare")
    bench.add_argument("--partitions", type=int, default=4)
    bench.add_argument("--shuffle-partitions", type=int, default=2)
    bench.add_argument("--known", type=int, default=0, help="jobs that are known and silent")
    bench.add_argument("--events", type=int, default=180_000)
    bench.add_argument("--passes", type=int, default=3)
    bench.add_argument("--rate", type=int, default=500, help="events a second of the steady load")
    bench.add_argument("--seconds", type=int, default=30)
    bench.add_argument("--all", action="store_true", help="every combination of the decision")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
