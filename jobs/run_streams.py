"""Runs the jobs together in one driver: settle_events, build_views; maintenance and audit_trail beside them.

Reads: what settle_events and build_views read.
Owns: what they own; it holds the lock of the views (view_lock.py) as long as it runs.
Guarantees: either all run or none: when one fails, all end, with exit code 1 and the reason.
On restart: each goes on as it says of itself; settle_events first, because a recovery needs the views at rest.

Run it with spark-submit; settings as everywhere (conf/trunkline.yaml, TRUNKLINE__… variables).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from jobs import build_views, settle_events
from jobs.ledger.audit_trail import AuditThread
from jobs.ledger.ledger_checkpoints import LedgerCheckpoints
from jobs.maintain_tables import Maintenance
from jobs.views.view_lock import views_lock
from schemas.errors import BackboneUnreachable, TrunklineError
from schemas.keys.sealing import load_keyring
from schemas.keys.umask import keep_files_private
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings, SettingsError, load_settings
from schemas.tables.fold_version import check_fold_version

PROGRAM = "run_streams"
_POLL_S = 0.2


def prepare_session(settings: Settings) -> SparkSession:
    """The session of the settling query. Raises BackboneUnreachable when a cluster's master takes no driver."""
    try:
        spark = SparkSession.builder.appName(PROGRAM).getOrCreate()
    except Py4JError as error:
        # The context that found no master, or was refused by it, has stopped itself: the log has said why.
        raise BackboneUnreachable(
            "Spark did not start, for the reason above. On a cluster: is the master of spark.master there, and "
            f"does SPARK_CONF_DIR hold the cluster's secret? ({str(error).splitlines()[0]})"
        ) from error
    spark.conf.set("spark.sql.shuffle.partitions", settings.spark.shuffle_partitions)
    return spark


def run(
    spark: SparkSession, settings: Settings, stopping: threading.Event, ready_file: Path | None
) -> str | None:
    """Run all until `stopping` is set or one fails; returns why one failed. Raises what the starts raise."""
    with ExitStack() as parts:
        checkpoints = LedgerCheckpoints(settings)
        audit = AuditThread(settings)
        # Stopped after the query, so that the last micro-batch is anchored.
        parts.callback(audit.stop)
        query = settle_events.start(spark, settings, after_batch=checkpoints.committed)
        parts.callback(query.stop)
        audit.start()
        build_views.prepare(settings)
        builder = build_views.ViewBuilder(settings)
        views = build_views.ViewThread(settings, builder)
        parts.callback(views.stop)
        views.start()
        maintenance = Maintenance(settings, builder)
        parts.callback(maintenance.stop)
        maintenance.start()
        while query.isActive and views.failure is None and not stopping.wait(_POLL_S):
            checkpoints.write_if_due()
            if ready_file is not None and views.is_ready and settle_events.is_ready(query):
                ready_file.touch()
                ready_file = None
        # What a query says after it was stopped in the middle of a micro-batch is no failure.
        reasons = [] if query.isActive else [f"{query.name}: {query.exception() or 'ended by itself'}"]
        if views.failure is not None:
            reasons.append(f"build_views: {views.failure}")
    return "; ".join(reasons) or None


def main() -> int:
    """Run until SIGTERM or SIGINT, or until one fails. Exit codes as everywhere; 1: one failed."""
    try:
        settings = load_settings()
        load_keyring(settings)
        check_topic(settings)
    except (SettingsError, TrunklineError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else error.exit_code
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    named = os.environ.get("TRUNKLINE_READY_FILE")
    try:
        with views_lock(settings):
            # A switch takes the same lock: looked at before it, the version could change until we have it.
            check_fold_version(settings)
            spark = prepare_session(settings)
            try:
                failure = run(spark, settings, stopping, Path(named) if named else None)
            finally:
                spark.stop()
    except TrunklineError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code
    if failure is not None:
        print(f"{PROGRAM}: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
