"""The settling job in a process of its own that kills itself, and its JVM, around a Delta commit.

python -m tests.jobs.crashing_settle before|after BATCH WORK_DIR
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from jobs import settle_events
from jobs.settling.ledger_sink import LedgerSink
from schemas.settings.settings import load_settings
from tests.spark_session import start_session


def die(spark: SparkSession) -> None:
    """kill -9 for the JVM and this process, with nothing flushed or closed."""
    jvm: Any = spark._jvm
    os.kill(int(jvm.java.lang.ProcessHandle.current().pid()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main(point: str, batch: int, work_dir: Path) -> None:
    """Settle until the crash."""
    spark = start_session(work_dir)
    append = LedgerSink.__call__

    def call(sink: LedgerSink, frame: DataFrame, batch_id: int) -> None:
        if point == "before" and batch_id == batch:
            die(spark)
        append(sink, frame, batch_id)

    def after(batch_id: int) -> None:
        if point == "after" and batch_id == batch:
            die(spark)

    LedgerSink.__call__ = call  # type: ignore[method-assign]
    query = settle_events.start(spark, load_settings(), available_now=True, after_batch=after)
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
