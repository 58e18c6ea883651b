"""Reads the topic by the settling job's own source in a Spark of its own, which says all that it does.

python -m tests.jobs.sasl_reader WORK_DIR: prints as JSON how many records there were, and whatever Spark shows
of the query: its plans, its progress, the command lines of its processes.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from connectors.programs.local_stack.part_plan import jvm_options
from jobs.settle_events import read_records
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE, kafka_password
from schemas.settings.settings import load_settings
from tests.spark_session import start_session


def command_lines() -> list[list[str]]:
    """Of this process and all that it has started."""
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            found.append(process.cmdline())
    return found


def main(work_dir: Path) -> None:
    """Read what is there and end."""
    settings = load_settings()
    if settings.kafka.security_protocol.startswith("SASL"):
        os.environ[PASSWORD_VARIABLE] = kafka_password(settings.kafka)
    spark = start_session(work_dir, conf={"spark.driver.extraJavaOptions": jvm_options(settings.kafka)})
    spark.sparkContext.setLogLevel("INFO")
    records = read_records(spark, settings)
    writer = records.select("value").writeStream.format("memory").queryName("found")
    query = writer.option("checkpointLocation", str(work_dir / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination(60)
    jvm: Any = query._jsq
    shown = {
        "records": spark.table("found").count(),
        "plans": [jvm.explainInternal(True), str(records._jdf.queryExecution().toString())],
        "progress": [one.json for one in query.recentProgress],
        "conf": [str(pair) for pair in spark.sparkContext.getConf().getAll()],
        "processes": command_lines(),
    }
    print(json.dumps(shown))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
