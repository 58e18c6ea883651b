"""How fast a full topic is settled: a plain Spark copy, the pipeline, and a Python peer, interleaved.

All three write the ledger's columns. The rates of the Spark ones are taken inside the micro-batches (from
Kafka to the commit; the planning of a query's first one is part of its start and printed apart), the
peer's from its first record to its last commit. `whole_…` are those of the Spark ones over all of their
micro-batches' time, with planning, offsets and Spark's own log, as the peer's counts all of its. The first pass
is reported as cold, the medians of the others as the result: the JVM alone makes the copy three times as fast
between its first and third pass. Limits that were not held are in `not_held`, and the exit code is 1.

`us_per_record` are the microseconds of processor time that each of the three costs for a record, by program:
Spark's JVM, its Python workers, the driver, Kafka, and the peer with its start.

`--events-per-job 12,1000` drains a topic for each of these numbers. `jobs_of_1000_…` are the figures of the
second; those of the first have no such prefix.

    ./trunkline bench drain --json
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery

from connectors.programs.local_stack.part_plan import DELTA_CONF, KAFKA
from jobs import settle_events
from schemas.settings.settings import Settings, StorageSettings, settings_environment
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.ledger import LEDGER
from tests.benchmarks.bench_report import Bench, Figures, add_phase, medians, numbers, prefixed, ratios, teller
from tests.benchmarks.bench_stack import fill_topic, kafka_alone
from tests.benchmarks.event_load import EVENTS_PER_JOB
from tests.benchmarks.process_times import spark_s
from tests.own_settings import stack_settings
from tests.programs import run_program
from tests.spark_session import start_session

PASS_LIMIT_S = 600
LEDGER_SPARK = from_arrow_schema(LEDGER_ARROW)
LIMITS = {"ratio_copy": 0.80, "ratio_peer": 2.0, "whole_ratio_copy": 0.70, "whole_ratio_peer": 1.6}
LONG = 1000
AT_LEAST = LIMITS | {f"jobs_of_{LONG}_{name}": limit for name, limit in LIMITS.items()}

say = teller("drain")


class SparkAppend:
    """A `foreachBatch` function that appends the ledger rows of each micro-batch with Spark.

    It does not protect against the repetition of a micro-batch.

    Args:
        path: The path or URI of the table.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Append the rows of `frame`."""
        frame.write.format("delta").mode("append").save(self._path)


def own_tables(settings: Settings, root: Path) -> Settings:
    """Return the settings with tables and local state below `root`."""
    return settings.model_copy(update={"storage": StorageSettings(tables=str(root), state=root / "state")})


def copy_frame(records: DataFrame) -> DataFrame:
    """A plain copy with the ledger's columns: what Kafka gives, literals for the rest, no Python."""
    key = F.col("key").cast("string")
    given = {
        "topic": F.col("topic"),
        "partition": F.col("partition"),
        "offset": F.col("offset"),
        "stream_kind": F.substring_index(key, "/", 1),
        "stream_id": F.substring_index(key, "/", -1),
        "ce_id": F.col("headers").getItem(1)["value"].cast("string"),
        "type": F.col("headers").getItem(3)["value"].cast("string"),
        "logged_at": F.col("timestamp"),
        "verdict": F.lit("accepted"),
        "late": F.lit(False),
        "fold_version": F.lit(1),
        "value": F.col("value"),
    }
    columns = [given.get(f.name, F.lit(None)).cast(f.dataType).alias(f.name) for f in LEDGER_SPARK]
    return records.select(*columns)


def start_copy(spark: SparkSession, settings: Settings, *, available_now: bool = True) -> StreamingQuery:
    """Start the copy as a query with one plain append for each micro-batch, and return it.

    Args:
        spark: The session, with Delta's classes.
        settings: The settings of Kafka and the tables. A copy with the same `storage.state` is continued.
        available_now: True: the query ends when all current records are copied. False: it runs until it is
            stopped.
    """
    sink = SparkAppend(settings.table_path(LEDGER))
    writer = copy_frame(settle_events.read_records(spark, settings)).writeStream
    writer = writer.option("checkpointLocation", (settings.state_path / "copy").as_uri()).foreachBatch(sink)
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif settings.spark.trigger_interval_ms:
        writer = writer.trigger(processingTime=f"{settings.spark.trigger_interval_ms} milliseconds")
    return writer.start()


def spark_rate(query: StreamingQuery, expected: int) -> tuple[float, float, str]:
    """Records a second inside the micro-batches and over all of their time, and a few words on them."""
    if not query.awaitTermination(PASS_LIMIT_S):
        raise RuntimeError("a pass took longer than its limit")
    progress = [p for p in query.recentProgress if p["numInputRows"]]
    rows = sum(p["numInputRows"] for p in progress)
    if rows != expected:
        raise RuntimeError(f"settled {rows} of {expected}")
    inside_s = sum(p["durationMs"]["addBatch"] for p in progress) / 1000
    planning_s = sum(p["durationMs"]["queryPlanning"] for p in progress) / 1000
    whole_s = sum(p["durationMs"]["triggerExecution"] for p in progress) / 1000
    words = f"{len(progress)} batches, {inside_s:.1f} s and {planning_s:.1f} s planning, {whole_s:.1f} s in all"
    return rows / inside_s, rows / whole_s, words


def peer_rate(settings: Settings, expected: int) -> tuple[float, float]:
    """Return records a second and microseconds of a record of the peer, in a process of its own."""
    done = run_program(
        [sys.executable, "-m", "tests.benchmarks.drain_peer", settings.table_path(LEDGER), str(expected)],
        timeout_s=PASS_LIMIT_S,
        env=os.environ | settings_environment(settings),
    )
    if done.returncode:
        raise RuntimeError(f"the peer failed:\n{done.stderr}")
    result = json.loads(done.stdout)
    return result["rows"] / result["seconds"], 1e6 * result["cpu_s"] / expected


def one_pass(spark: SparkSession, settings: Settings, root: Path, expected: int, kafka_pid: int) -> Figures:
    """Run one pass of each, in turn, each into tables of its own."""
    found: Figures = {"us_per_record": {}}
    for name in ("copy", "pipeline", "peer"):
        at = own_tables(settings, root / name)
        words, before = "a commit a second", spark_s(kafka_pid)
        peer_us = 0.0
        if name == "peer":
            found[name], peer_us = peer_rate(at, expected)
        else:
            start = start_copy if name == "copy" else start_pipeline
            found[name], found[f"whole_{name}"], words = spark_rate(start(spark, at), expected)
        us = {part: 1e6 * (used - before[part]) / expected for part, used in spark_s(kafka_pid).items()}
        found["us_per_record"][name] = {"peer": peer_us, KAFKA: us[KAFKA]} if peer_us else us
        spent = ", ".join(f"{part} {each:.1f}" for part, each in found["us_per_record"][name].items())
        say(f"  {name}: {found[name]:,.0f} records/s ({words}); us a record: {spent}")
    return found


def start_pipeline(spark: SparkSession, settings: Settings) -> StreamingQuery:
    """The full pipeline as a query that ends when all is settled."""
    return settle_events.start(spark, settings, available_now=True)


def summary(passes: list[Figures]) -> Figures:
    """Return the figures of some passes: medians, and the ratios of the medians."""
    median = medians(passes)
    found = {
        f"{name}_eps": round(median[name])
        for name in ("copy", "pipeline", "peer", "whole_copy", "whole_pipeline")
    }
    pairs = {
        "ratio_copy": ("pipeline", "copy"),
        "ratio_peer": ("pipeline", "peer"),
        "whole_ratio_copy": ("whole_pipeline", "whole_copy"),
        "whole_ratio_peer": ("whole_pipeline", "peer"),
    }
    return {**found, **ratios(median, pairs), "us_per_record": median["us_per_record"]}


def measure(events_wanted: int, sizes: list[int], warm_passes: int, work: Path) -> Figures:
    """Fill a topic for each size of a job, and drain it `1 + warm_passes` times by each of the three."""
    settings = stack_settings(work / "data")
    found: Figures = {}
    with kafka_alone(settings) as stack:
        kafka_pid = stack[KAFKA].pid
        assert kafka_pid is not None
        # The copy needs Delta's classes; both pay for them.
        spark = start_session(work, settings.spark.tasks, DELTA_CONF)

        def passes_of(per_job: int) -> Figures:
            kafka = settings.kafka.model_copy(update={"topic": f"{settings.kafka.topic}.{per_job}"})
            at = settings.model_copy(update={"kafka": kafka})
            count = fill_topic(at, events_wanted, per_job=per_job)
            say(f"{count:,} records in the topic, {per_job} events a job")
            passes = []
            for number in range(1 + warm_passes):
                say(f"pass {number + 1} of {1 + warm_passes}")
                folder = work / f"jobs-of-{per_job}" / f"pass-{number}"
                passes.append(one_pass(spark, at, folder, count, kafka_pid))
            figures = {**summary(passes[1:]), "events": count, "cold": summary(passes[:1])}
            return figures if per_job == sizes[0] else prefixed(f"jobs_of_{per_job}", figures)

        for per_job in sizes:
            add_phase(found, partial(passes_of, per_job))
        spark.stop()
    return {**found, "warm_passes": warm_passes, "events_per_job": sizes}


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("drain", __doc__, at_least=AT_LEAST)
    bench.add_argument("--events", type=int, default=300_000, help="job events to settle (default 300,000)")
    bench.add_argument("--passes", type=int, default=3, help="warm passes, of which the median counts")
    bench.add_argument(
        "--events-per-job", type=numbers, default=[EVENTS_PER_JOB, LONG], help="sizes of jobs (default 12,1000)"
    )
    return bench.run(lambda args, work: measure(args.events, args.events_per_job, args.passes, work))


if __name__ == "__main__":
    sys.exit(main())
