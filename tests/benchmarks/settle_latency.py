"""Measure the settling job beside a plain Spark copy of the log: its throughput, and how late its commits are.

Both run in one Spark session, in turns. The copy writes the ledger's columns without any Python, so it shows
what Kafka, Spark and Delta take. First each drains the full topic, in passes with new tables. Then each takes
rounds under a steady load of new events.

- `drain_eps` and `copy_eps`: records per second inside the micro-batches, the median of the warm passes.
- `p50_s` and `p95_s`: seconds from Kafka's append to the commit, of the commits in the second half of a load.
  `control_p50_s` and `control_p95_s` are those of the copy. All are medians of the rounds.
- `batch_p50_ms`: how long a micro-batch of the settling job took then, in ms.

`rounds` has the figures of each round.

    ./trunkline bench settle_latency --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from connectors.local_stack import free_port
from connectors.local_stack.spark_command import DELTA_CONF
from jobs import settle_events
from schemas.settings.settings import KafkaSettings, Settings
from tests.benchmarks.bench_report import Bench, quantile, teller
from tests.benchmarks.bench_stack import filled_topic
from tests.benchmarks.drain import own_tables, spark_rate, start_copy
from tests.benchmarks.event_load import SteadyLoad, jobs_for
from tests.benchmarks.growth import ledger_ages
from tests.own_settings import stack_settings
from tests.spark_session import start_session

FORMS = {"copy": start_copy, "drain": settle_events.start}
CAUGHT_UP_WITHIN_S = 600

say = teller("settle_latency")


def drain_pass(spark: SparkSession, settings: Settings, root: Path, expected: int) -> dict[str, float]:
    """Drain the topic by each form in turn, into new tables. Return the records per second of each."""
    rates = {}
    for form, start in FORMS.items():
        query = start(spark, own_tables(settings, root / form), available_now=True)
        rates[form], _, words = spark_rate(query, expected)
        say(f"  {form}: {rates[form]:,.0f} records/s ({words})")
    return rates


def catch_up(query: StreamingQuery) -> None:
    """Wait until the query has processed all records of the topic.

    Raises:
        RuntimeError: The query ended, or has not caught up within 600 seconds.
    """
    deadline = time.monotonic() + CAUGHT_UP_WITHIN_S
    while query.status["message"] != "Waiting for data to arrive":
        if time.monotonic() > deadline or not query.isActive:
            raise RuntimeError(f"the query has not caught up: {query.exception()}")
        time.sleep(0.5)


def turn(spark: SparkSession, at: Settings, form: str, load: SteadyLoad, seconds: int) -> dict[str, float]:
    """Run one form under a load, and return the figures of the load's second half.

    Args:
        spark: The session.
        at: Settings with the tables of this form. It continues where it ended before.
        form: The name of the form.
        load: The load, not started.
        seconds: How long the load lasts.
    """
    query = FORMS[form](spark, at, available_now=False)
    try:
        catch_up(query)
        half = time.time() + seconds / 2
        load.run()
        catch_up(query)
        took_ms = [
            progress["durationMs"]["triggerExecution"]
            for progress in query.recentProgress
            if progress["numInputRows"] and datetime.fromisoformat(progress["timestamp"]).timestamp() >= half
        ]
    finally:
        query.stop()
    ages = ledger_ages(at, half)
    return {
        "p50_s": round(quantile(ages, 0.5), 3),
        "p95_s": round(quantile(ages, 0.95), 3),
        "batch_p50_ms": statistics.median(took_ms),
    }


def one_round(
    spark: SparkSession, settings: Settings, root: Path, args: argparse.Namespace, first_job: int
) -> dict[str, float]:
    """Run each form in turn under a load with new jobs, and return their figures."""
    figures: dict[str, float] = {}
    for number, form in enumerate(FORMS):
        # The same events again would be duplicates, which are settled otherwise.
        first = first_job + number * jobs_for(args.rate * args.seconds)
        load = SteadyLoad(settings, args.rate, args.seconds, first)
        found = turn(spark, own_tables(settings, root / form), form, load, args.seconds)
        say(f"  {form}: {found}")
        if form == "copy":
            found = {f"control_{name}": found[name] for name in ("p50_s", "p95_s")}
        figures |= found
    return figures


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Fill a topic on a Kafka of its own, let both drain it, then let both follow a load."""
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}", partitions=args.partitions)
    settings = stack_settings(work / "data", kafka=kafka)
    drained, per_round = jobs_for(args.events), len(FORMS) * jobs_for(args.rate * args.seconds)
    with filled_topic(settings, args.events, drained + args.rounds * per_round) as count:
        say(f"{count:,} records in the topic")
        # The copy needs Delta's classes, which make the planning of each query slower: of both.
        spark = start_session(work, settings.spark.tasks, DELTA_CONF)
        passes = []
        for number in range(1 + args.passes):
            say(f"pass {number + 1} of {1 + args.passes}")
            passes.append(drain_pass(spark, settings, work / f"pass-{number}", count))
        rounds = []
        for number in range(args.rounds):
            say(f"round {number + 1} of {args.rounds}")
            # Both continue the tables of the last pass, so nothing is drained again.
            root, first = work / f"pass-{args.passes}", drained + number * per_round
            rounds.append(one_round(spark, settings, root, args, first))
        spark.stop()
    warm = {form: [rates[form] for rates in passes[1:] or passes] for form in FORMS}
    return {
        **{f"{form}_eps": round(statistics.median(rates)) for form, rates in warm.items()},
        **{name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]},
        "rounds": rounds,
        "cold": {f"{form}_eps": round(rate) for form, rate in passes[0].items()},
        "partitions": args.partitions,
        "records": count,
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("settle_latency", __doc__)
    bench.add_argument("--events", type=int, default=180_000, help="job events to drain (default 180,000)")
    bench.add_argument("--passes", type=int, default=3, help="warm passes, of which the median counts")
    bench.add_argument("--rate", type=int, default=500, help="events a second of the steady load (default 500)")
    bench.add_argument("--seconds", type=int, default=30, help="length of each load (default 30)")
    bench.add_argument("--partitions", type=int, default=4, help="partitions of the topic (default 4)")
    bench.add_argument("--rounds", type=int, default=2, help="loads for each form (default 2)")
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
