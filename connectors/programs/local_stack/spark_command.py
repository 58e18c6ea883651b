"""Options of spark-submit that say where tasks run: in the driver, or on a cluster's executors."""

from __future__ import annotations

import os
from typing import Final

from connectors.programs.local_stack.programs import jar_files
from schemas.settings.settings import PROJECT_ROOT, SparkSettings

# For a session that reads or writes tables with Spark's Delta. The jobs do not use it: its rules run in each
# plan that Spark makes, which takes a tenth of a micro-batch (decision 0011).
DELTA_CONF: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The default of 50 made the first read of a table take seconds.
    "spark.databricks.delta.snapshotPartitions": "2",
}


def is_local(master: str) -> bool:
    """Return whether this value of `spark.master` runs driver and tasks in one process, such as `local[2]`."""
    return master.partition("[")[0] == "local"


def log_option() -> str:
    """Return the JVM option that configures a Java program's log by `conf/log4j2.properties`."""
    return f"-Dlog4j2.configurationFile={(PROJECT_ROOT / 'conf' / 'log4j2.properties').as_uri()}"


def class_path() -> str:
    """Return the class path of Spark's connectors and of the local file system, for driver and executors.

    Hadoop looks for these jars before Spark has added its own.

    Raises:
        TrunklineError: The jars are not installed.
    """
    return os.pathsep.join(str(jar) for jar in jar_files("spark"))


def executor_conf(spark: SparkSettings) -> dict[str, str]:
    """Return Spark's properties for executors on a cluster, by name.

    Executors inherit nothing else from the driver. They find modules and jars in a checkout at the same path.
    Keys and passwords come from files, or from the environment of Spark's worker process that starts the
    executors (decision 0022).
    """
    return {
        "spark.executor.memory": spark.executor_memory,
        # More cores would never be used at once; the rest of the cluster is for other applications.
        "spark.cores.max": str(spark.tasks),
        "spark.executor.extraClassPath": class_path(),
        "spark.executor.extraJavaOptions": log_option(),
        "spark.executorEnv.PYTHONPATH": str(PROJECT_ROOT),
        # How long a task waits for the executor that has settled its partition before, and how often the
        # scheduler looks for waiting tasks. The defaults, 3 s and 1 s, are longer than the preceding tasks
        # take: a worker that came back would settle nothing for a long time, or never.
        "spark.locality.wait": "100ms",
        "spark.scheduler.revive.interval": "100ms",
    }


def place_options(spark: SparkSettings) -> list[str]:
    """Return the options of spark-submit that say where tasks run, by `spark.master`.

    On a cluster they include the executors' properties.
    """
    where = ["--master", spark.master]
    if is_local(spark.master):
        return where
    pairs = [word for name, value in executor_conf(spark).items() for word in ("--conf", f"{name}={value}")]
    # The cluster's own properties include its secret, which must not be on a command line.
    return [*where, "--load-spark-defaults", *pairs]
