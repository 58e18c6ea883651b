"""Tidies the tables up from inside the streaming driver: few files, no files that nobody reads, a short log.

Reads: the ledger and the view tables.
Owns: nothing; it works as the tables' one writer does, in the same driver: Spark on the ledger, delta-rs on the
views, there between two micro-batches.
Guarantees: no row is changed or removed. Files that were replaced are kept for `views.keep_old_files_h`, at
least for an hour, so that a reader that holds a version can finish. What fails is said and tried again at the
next interval; the streams go on.
On restart: nothing to go on from.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Final

from delta.tables import DeltaTable
from deltalake import DeltaTable as TableReader
from pyspark.sql import SparkSession

from jobs.build_views import KEEP_AT_LEAST_H, ViewSink
from schemas.ledger import LEDGER
from schemas.settings import Settings

# A directory of the log with tens of thousands of files makes each commit slow. The newest 1,000 commits,
# which jobs/once_sink.py may look at after a start, are there whenever the job has just written them.
LOG_KEEP_MIN: Final = 60
# Files of the ledger that are smaller are put together, to files of at most so much: a task of about a second.
_SMALL_FILE_BYTES: Final = 16 * 1024 * 1024
_FULL_FILE_BYTES: Final = 32 * 1024 * 1024
_POLL_S: Final = 0.5


def tidy_views(sink: ViewSink, keep_h: float) -> None:
    """Compact the view tables, and delete files that were replaced more than `keep_h` hours ago."""
    for table in sink.tables.values():
        with sink.lock:
            table.tidy(keep_h)


def tidy_ledger(spark: SparkSession, settings: Settings, keep_h: float | None = None) -> None:
    """The same for the ledger. Appends go on meanwhile: what OPTIMIZE commits changes no data.

    How long its replaced files are kept stands in the table's properties (build_views.create_ledger); Delta
    takes no other number than 0, which only tests give.
    """
    session = spark.newSession()
    for name, value in {
        "spark.databricks.delta.optimize.minFileSize": _SMALL_FILE_BYTES,
        "spark.databricks.delta.optimize.maxFileSize": _FULL_FILE_BYTES,
        # One at a time: the settling query must find a free core.
        "spark.databricks.delta.optimize.maxThreads": 1,
        "spark.databricks.delta.retentionDurationCheck.enabled": "false",
        # VACUUM lists the folder in as many tasks: 10,000 by default, which blocks the streams for minutes.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": 1,
        "spark.sql.shuffle.partitions": 1,
    }.items():
        session.conf.set(name, str(value))
    path = settings.table_path(LEDGER)
    table = DeltaTable.forPath(session, path)
    table.optimize().executeCompaction()
    table.vacuum(keep_h)
    shorten_log(session, path, LOG_KEEP_MIN)


def shorten_log(spark: SparkSession, path: str, keep_min: int) -> None:
    """Delete the files of a table's log that are older and that its newest checkpoint replaces.

    Delta does so by itself, but only once a day has passed (it rounds the age down to days).
    """
    jvm: Any = spark._jvm
    delta = jvm.org.apache.spark.sql.delta
    log = delta.DeltaLog.forTable(spark._jsparkSession, path)
    # Scala wants an Option of a long; Python's numbers reach it as an int.
    keep_ms = keep_min * 60_000
    age = jvm.java.util.stream.LongStream.rangeClosed(keep_ms, keep_ms).boxed().findFirst()
    option = jvm.scala.jdk.javaapi.OptionConverters.toScala(age)
    granularity = getattr(delta, "TruncationGranularity$").__getattr__("MODULE$").MINUTE()
    log.cleanUpExpiredLogs(log.unsafeVolatileSnapshot(), jvm.scala.Option.empty(), option, granularity)


class Maintenance:
    """A thread that tidies up every `views.maintenance_interval_s` seconds (0: never), until `stop`."""

    def __init__(self, spark: SparkSession, settings: Settings, sink: ViewSink) -> None:
        self._spark = spark
        self._settings = settings
        self._sink = sink
        self._stopping = threading.Event()
        self._tidied: int | None = None
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is anything for it to do."""
        if self._settings.views.maintenance_interval_s > 0:
            self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it after what it is doing."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        interval = self._settings.views.maintenance_interval_s
        while not self._stopping.wait(interval):
            began = time.monotonic()
            try:
                self.tidy()
            except Exception as error:  # noqa: BLE001  the streams matter more; the next round tries again
                if not self._stopping.is_set():
                    print(f"maintain_tables: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                self.rounds += 1
                print(f"maintain_tables: done in {time.monotonic() - began:.1f} s", file=sys.stderr)

    def tidy(self) -> None:
        """One round. An idle ledger is left alone: each round would add commits to its log."""
        keep_h = max(KEEP_AT_LEAST_H, self._settings.views.keep_old_files_h)
        path = self._settings.table_path(LEDGER)
        if self._tidied == TableReader(path).version():
            return
        tidy_views(self._sink, keep_h)
        tidy_ledger(self._spark, self._settings)
        self._tidied = TableReader(path).version()
