"""What spark-submit is told about where tasks run: in the driver, or on a cluster's executors."""

from __future__ import annotations

import os
from typing import Final

from connectors.local_stack.programs import jar_files
from schemas.settings.settings import PROJECT_ROOT, SparkSettings

# For a session that reads or writes tables by Spark's Delta. The jobs do without: its rules take part in each
# plan that Spark makes, a tenth of a micro-batch (decision 0011).
DELTA_CONF: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The default of 50 made the first read of a table take seconds.
    "spark.databricks.delta.snapshotPartitions": "2",
}


def is_local(master: str) -> bool:
    """Whether driver and tasks share one process."""
    return master.partition("[")[0] == "local"


def log_option() -> str:
    """The option of a JVM that makes it log as our parts do."""
    return f"-Dlog4j2.configurationFile={(PROJECT_ROOT / 'conf' / 'log4j2.properties').as_uri()}"


def class_path() -> str:
    """Spark's connectors and the local file system, which Hadoop looks for before Spark has added its jars."""
    return os.pathsep.join(str(jar) for jar in jar_files("spark"))


def executor_conf(spark: SparkSettings) -> dict[str, str]:
    """Spark's properties of the executors on a cluster, which have nothing of the driver's but what these say.

    They find modules and jars in a checkout at the same path, and keys and passwords in files, or in the
    environment of the worker that starts them (decision 0022).
    """
    return {
        "spark.executor.memory": spark.executor_memory,
        # More would never run at once; the rest of the cluster is for others.
        "spark.cores.max": str(spark.shuffle_partitions),
        "spark.executor.extraClassPath": class_path(),
        "spark.executor.extraJavaOptions": log_option(),
        "spark.executorEnv.PYTHONPATH": str(PROJECT_ROOT),
        # A task waits so long for the executor that has its state, and the scheduler looks so often for tasks
        # that have waited. The defaults, 3 s and 1 s, are longer than the tasks before it take: a worker that
        # came back would settle nothing for long, or for ever.
        "spark.locality.wait": "100ms",
        "spark.scheduler.revive.interval": "100ms",
    }


def place_options(spark: SparkSettings) -> list[str]:
    """The options of spark-submit that say where tasks run."""
    where = ["--master", spark.master]
    if is_local(spark.master):
        return where
    pairs = [word for name, value in executor_conf(spark).items() for word in ("--conf", f"{name}={value}")]
    # The cluster's own properties, among them its secret, which no command line may show.
    return [*where, "--load-spark-defaults", *pairs]
