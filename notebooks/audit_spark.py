"""Spark for an audit notebook: a session that only reads, and the tables at the audit's versions."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.pandas.types import from_arrow_schema

from connectors.programs.local_stack.part_plan import reader_environment
from notebooks.audit_tables import Audit
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW, VIEW_ARROW
from schemas.tables.ledger import LEDGER


def spark_session(settings: Settings) -> SparkSession:
    """Return a Spark session with times in UTC. Spark is started in this process if it does not run.

    Spark runs until the process ends.

    Raises:
        TrunklineError: There is no Java 17, 21 or 25, or Spark's jars are not installed.
    """
    running = SparkSession.getActiveSession()
    session = _started(settings) if running is None else running.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    return session


def _started(settings: Settings) -> SparkSession:
    scratch = tempfile.mkdtemp(prefix="trunkline-audit-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    os.environ.update(reader_environment(settings, scratch))
    return SparkSession.builder.appName("trunkline audit").getOrCreate()


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
