"""Spark for an audit notebook: a session that only reads, and the tables at the audit's versions."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import tempfile

from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.pandas.types import from_arrow_schema

from connectors.programs.local_stack.java_programs import java_home
from connectors.programs.local_stack.part_plan import (
    DELTA_CONF,
    JARS,
    JVM_LOCALE,
    object_store_conf,
    place_options,
)
from notebooks.audit_tables import Audit
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.tables.arrow_tables import LEDGER_ARROW, VIEW_ARROW
from schemas.tables.ledger import LEDGER


def spark_session(settings: Settings) -> SparkSession:
    """Return a Spark session with times in UTC. Spark is started in this process if it does not run.

    Spark runs until the process ends.

    Raises:
        TrunklineError: There is no Java 17, 21 or 25.
        RuntimeError: Spark's jars are not installed.
    """
    running = SparkSession.getActiveSession()
    session = _started(settings) if running is None else running.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    return session


def _started(settings: Settings) -> SparkSession:
    jars = JARS / "spark"
    if not any(jars.glob("*.jar")):
        raise RuntimeError("Spark's jars are not there: run ./trunkline doctor once")
    os.environ["JAVA_HOME"] = str(java_home())
    # Without it a JVM does not find jars below a folder whose name is not ASCII.
    os.environ.update(JVM_LOCALE)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # An old address of this machine in its hosts file would make Spark listen elsewhere.
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join(
        [
            *("--properties-file", str(PROJECT_ROOT / "conf" / "spark-defaults.conf")),
            *("--driver-memory", settings.spark.driver_memory, *place_options(settings)),
            *("--driver-class-path", f"{jars}/*:{JARS / 's3'}/*", "pyspark-shell"),
        ]
    )
    scratch = tempfile.mkdtemp(prefix="trunkline-audit-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    builder = SparkSession.builder.appName("trunkline audit").config("spark.log.level", "ERROR")
    builder = builder.config("spark.sql.shuffle.partitions", str(settings.spark.tasks))
    builder = builder.config("spark.local.dir", scratch).config(
        "spark.sql.warehouse.dir", f"{scratch}/warehouse"
    )
    # By default Ivy's folder is in the home, which a user may not have.
    builder = builder.config("spark.jars.ivy", f"{scratch}/ivy")
    for name, value in (DELTA_CONF | object_store_conf(settings.tables_root)).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def frame(spark: SparkSession, audit: Audit, name: str) -> DataFrame:
    """Return the table `name` as a Spark frame, at the version that `audit` has opened.

    The frame has no rows if the table does not exist.
    """
    schema = LEDGER_ARROW if name == LEDGER else VIEW_ARROW[name]
    version = audit.version(name)
    if version is None:
        # An empty list would start a Python process.
        fields = from_arrow_schema(schema, prefer_timestamp_ntz=False).fields
        columns = [functions.lit(None).cast(field.dataType).alias(field.name) for field in fields]
        return spark.range(0).select(*columns)
    found = spark.read.format("delta").option("versionAsOf", version).load(audit.path(name))
    return found.select(*schema.names)
