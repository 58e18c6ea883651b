"""Fixtures of the Spark tests: one session for all, and a topic drained into its ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from connectors.local_stack.spark_command import DELTA_CONF
from jobs import settle_events
from schemas.settings.settings import Settings
from schemas.tables.ledger import LEDGER
from tests.spark_session import start_session

Rows = list[dict[str, Any]]
DRAIN_LIMIT_S = 120


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Spark session as the local stack configures it, and with Delta's extension for tests in which Spark
    reads a table by it. The jobs' own session, as in test_run_streams.py, does without.
    """
    session = start_session(tmp_path_factory.mktemp("spark"), conf=DELTA_CONF)
    yield session
    session.stop()


def ledger_rows(settings: Settings) -> Rows:
    """All rows of the ledger, in the order of the log."""
    table = DeltaTable(settings.table_path(LEDGER)).to_pyarrow_table()
    return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"]))


@pytest.fixture
def drain(spark: SparkSession, backbone_settings: Settings) -> Callable[[], Rows]:
    """Settle all that is in the topic by the real job, and read the ledger."""

    def run() -> Rows:
        query = settle_events.start(spark, backbone_settings, available_now=True)
        assert query.awaitTermination(DRAIN_LIMIT_S), "the query did not end in time"
        return ledger_rows(backbone_settings)

    return run
