"""The streaming driver: runs settle_events, build_views, maintenance and audit_trail together.

Reads: the inputs of settle_events and build_views.
Owns: their outputs; it holds the claim of the tables (`WriterClaim`) while it runs.
Guarantees: either all run or none. If one fails, all stop, with exit code 1 and the reason.
On restart: each continues as its module says. Missing views are built before settle_events starts, because its
tasks read stream_entries.

Run it with spark-submit, with the usual settings (conf/trunkline.yaml, TRUNKLINE__… variables).
"""

from __future__ import annotations

import os
import pwd
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.sql import SparkSession

from jobs import build_views, settle_events
from jobs.driver.programs import WriterClaim, exit_code_of
from jobs.ledger.audit_trail import AuditThread
from jobs.ledger.ledger_table import LedgerCheckpoints, create_ledger, prepare_ledger
from jobs.maintain_tables import Maintenance
from schemas.keys.sealing import load_keyring
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings, load_settings
from schemas.tables.fold_version import check_fold_version
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.private_files import keep_files_private

PROGRAM = "run_streams"
_POLL_S = 0.2


def prepare_session(settings: Settings) -> SparkSession:
    """Start Spark and return the session for the settling query.

    Raises:
        BackboneUnreachable: Spark does not start, for example because the cluster's master does not answer.
    """
    try:
        _name_user()
        spark = SparkSession.builder.appName(PROGRAM).getOrCreate()
    except Py4JError as error:
        # A context without a master, or refused by it, has stopped itself and logged the reason.
        raise BackboneUnreachable(
            "Spark did not start, for the reason above. On a cluster: is the master of spark.master there, and "
            f"does SPARK_CONF_DIR hold the cluster's secret? ({' '.join(str(error).splitlines()[:2])})"
        ) from error
    return spark


def _name_user() -> None:
    """Give Hadoop a user's name if this process's user has none, as in a container with a uid of its own.

    Hadoop asks Java for the name and starts nothing without one, although local files need the number alone.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        SparkContext._ensure_initialized()  # starts the gateway to the JVM, and no context
        jvm: Any = SparkContext._jvm
        users = jvm.org.apache.hadoop.security.UserGroupInformation
        users.setLoginUser(users.createRemoteUser(f"uid-{os.getuid()}"))


def run(
    spark: SparkSession,
    settings: Settings,
    stopping: threading.Event,
    ready_file: Path | None,
    claim: WriterClaim,
) -> str | None:
    """Run the settling query, the view builder, maintenance and the audit trail; block until they end.

    All end when `stopping` is set, when the settling query or the view builder fails, or when the claim is
    lost. Errors of maintenance and of the audit trail are printed to stderr, and both try again.

    Args:
        spark: The session.
        settings: The settings of all parts.
        stopping: Ends the run when it is set.
        ready_file: Created when the query settles records and the views are up to date. None: no file.
        claim: The claim of the tables. The run ends when it is lost.

    Returns:
        The reason of a failure; None after a stop without one.

    Raises:
        TrunklineError: A part cannot start, for example because the views are ahead of the ledger or Kafka
            does not answer.
    """

    def check() -> None:
        claim.check()
        if stopping.is_set():
            raise SystemExit(0)

    prepare_ledger(settings, check)
    # A rebuild puts other rows in the place of those that the first tasks read.
    build_views.prepare(settings, check)
    with ExitStack() as parts:
        checkpoints = LedgerCheckpoints(settings)
        audit = AuditThread(settings)
        # The audit stops after the query, so that the last micro-batch is anchored.
        parts.callback(audit.stop)
        query = settle_events.start(spark, settings, after_batch=checkpoints.committed, check=claim.check)
        parts.callback(query.stop)
        audit.start()
        builder = build_views.ViewBuilder(settings)
        parts.callback(builder.close)
        claim.check()
        views = build_views.ViewThread(settings, builder)
        parts.callback(views.stop)
        views.start()
        maintenance = Maintenance(settings, builder, claim.check)
        parts.callback(maintenance.stop)
        maintenance.start()
        while query.isActive and views.failure is None and claim.lost is None and not stopping.wait(_POLL_S):
            checkpoints.write_if_due()
            if ready_file is not None and views.is_ready and settle_events.is_ready(query):
                ready_file.touch()
                ready_file = None
        # An error of a query that was stopped in the middle of a micro-batch is no failure.
        reasons = [] if query.isActive else [f"{query.name}: {query.exception() or 'ended by itself'}"]
        if views.failure is not None:
            reasons.append(f"build_views: {views.failure}")
        if claim.lost is not None:
            reasons = [claim.lost]
    if not reasons:
        settle_events.trust_stores(settings)
    return "; ".join(reasons) or None


def main() -> int:
    """Run the streaming driver until SIGTERM, SIGINT or a failure, and return its exit code.

    The code is 0 after a signal and 1 if a part failed while running. An error at the start has its own code.
    """
    return exit_code_of(PROGRAM, _run_until_signal)


def _run_until_signal() -> int:
    settings = load_settings()
    load_keyring(settings)
    check_topic(settings)
    signals, stopping = (signal.SIGTERM, signal.SIGINT), threading.Event()
    for number in signals:
        signal.signal(number, lambda *_: sys.exit(0))
    named = os.environ.get("TRUNKLINE_READY_FILE")
    create_ledger(settings)
    build_views.check_not_ahead(settings)
    with WriterClaim(settings) as claim:
        for number in signals:
            signal.signal(number, lambda *_: stopping.set())
        # A switch of the fold takes the same claim, so the version cannot change after this check.
        check_fold_version(settings)
        spark = prepare_session(settings)
        try:
            failure = run(spark, settings, stopping, Path(named) if named else None, claim)
        finally:
            spark.stop()
    if failure is not None:
        print(f"{PROGRAM}: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
