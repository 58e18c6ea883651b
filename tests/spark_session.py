"""A Spark session in this process, configured as the local stack configures spark-submit."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from connectors.programs.local_stack.java_programs import java_home
from connectors.programs.local_stack.part_plan import JVM_LOCALE, class_path
from schemas.log_access.kafka_clients import PASSWORD_VARIABLE
from tests.broker_processes import KAFKA_PASSWORD

ROOT = Path(__file__).resolve().parent.parent


def start_session(
    work_dir: Path, shuffle_partitions: int = 2, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Start the session; one a process. `work_dir` takes all that Spark writes beside tables."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.update(JVM_LOCALE)
    # Spark's JVM looks up there what `kafka_at` says.
    os.environ.setdefault(PASSWORD_VARIABLE, KAFKA_PASSWORD)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = [
        *("--properties-file", str(ROOT / "conf" / "spark-defaults.conf")),
        *("--driver-memory", "2g", "--master", "local[2]", "--driver-class-path", class_path()),
        "pyspark-shell",
    ]
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join(arguments)
    builder = SparkSession.builder.appName("tests")
    builder = builder.config("spark.sql.shuffle.partitions", str(shuffle_partitions))
    builder = builder.config("spark.local.dir", str(work_dir / "spark-local"))
    builder = builder.config("spark.sql.warehouse.dir", str(work_dir / "warehouse"))
    builder = builder.config("spark.jars.ivy", str(work_dir / "ivy"))
    builder = builder.config("spark.log.level", "ERROR")
    for name, value in (conf or {}).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
