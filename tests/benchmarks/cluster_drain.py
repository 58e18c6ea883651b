"""The cost of a cluster of processes: a full topic settled in local mode, then on a standalone cluster.

Master, workers and driver are on this machine; each worker has one core. The same topic is drained by the same
job, first by as many threads in the driver as there are workers, then by their executors. Rates are taken as in
`drain`: inside the micro-batches, the first pass of each apart. Local mode comes first and whole, because its
JVM warms up from pass to pass, as the executors' do.

    ./trunkline bench cluster_drain --events 60000 --json
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from connectors.local_stack.spark_command import executor_conf
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE
from schemas.settings.settings import Settings, SparkSettings, StorageSettings
from tests.benchmarks.bench_report import Bench
from tests.benchmarks.bench_stack import filled_topic
from tests.benchmarks.drain import say, spark_rate, start_pipeline
from tests.own_settings import stack_settings
from tests.spark_cluster import SparkCluster
from tests.spark_session import start_session


def passes(spark: SparkSession, settings: Settings, root: Path, count: int, expected: int) -> list[float]:
    """The rates of `count` passes over the topic, each into tables of its own."""
    rates = []
    for number in range(count):
        at = StorageSettings(tables=str(root / f"{number}"), state=root / f"{number}-state")
        query = start_pipeline(spark, settings.model_copy(update={"storage": at}))
        rate, _, words = spark_rate(query, expected)
        say(f"  {root.name}, pass {number + 1}: {rate:,.0f} records/s ({words})")
        rates.append(rate)
    return rates


def measure(events_wanted: int, warm_passes: int, workers: int, memory: str, work: Path) -> dict[str, Any]:
    """Fill a topic and drain it `1 + warm_passes` times in each mode."""
    spark = SparkSettings(master=f"local[{workers}]", executor_memory=memory, tasks=workers)
    settings = stack_settings(work / "data", spark=spark)
    rates: dict[str, list[float]] = {}
    with filled_topic(settings, events_wanted) as count:
        say(f"{count:,} records in the topic")
        session = start_session(work, workers, {"spark.master": spark.master})
        rates["local"] = passes(session, settings, work / "local", 1 + warm_passes, count)
        session.stop()
        cluster = SparkCluster(work / "cluster", memory)
        try:
            cluster.start(workers)
            # The workers have an environment of their own, without the login to this Kafka.
            login = {f"spark.executorEnv.{PASSWORD_VARIABLE}": os.environ[PASSWORD_VARIABLE]}
            conf = {**executor_conf(spark), **cluster.properties, **login, "spark.master": cluster.url}
            session = start_session(work, workers, conf)
            rates["cluster"] = passes(session, settings, work / "on-cluster", 1 + warm_passes, count)
            session.stop()
        finally:
            cluster.close()
    local, on_cluster = (statistics.median(rates[mode][1:]) for mode in ("local", "cluster"))
    return {
        "events": count,
        "workers": workers,
        "warm_passes": warm_passes,
        "local_eps": round(local),
        "cluster_eps": round(on_cluster),
        "ratio_cluster": round(on_cluster / local, 3),
        "cold": {mode: round(found[0]) for mode, found in rates.items()},
        "passes": {mode: [round(rate) for rate in found] for mode, found in rates.items()},
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("cluster_drain", __doc__)
    bench.add_argument("--events", type=int, default=100_000, help="job events to settle (default 100,000)")
    bench.add_argument("--passes", type=int, default=3, help="warm passes of each, of which the median counts")
    bench.add_argument("--workers", type=int, default=2, help="workers, and threads in local mode (default 2)")
    bench.add_argument("--worker-memory", default="1g", help="memory of an executor (default 1g)")
    return bench.run(
        lambda args, work: measure(args.events, args.passes, args.workers, args.worker_memory, work)
    )


if __name__ == "__main__":
    sys.exit(main())
