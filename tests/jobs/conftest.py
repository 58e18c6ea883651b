"""Fixtures and helpers of the Spark tests: a topic drained into its ledger."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs import settle_events
from schemas.settings.settings import Settings
from schemas.tables.ledger import LEDGER

Rows = list[dict[str, Any]]
DRAIN_LIMIT_S = 120


def ledger_rows(settings: Settings) -> Rows:
    """All rows of the ledger, in the order of the log."""
    table = DeltaTable(settings.table_path(LEDGER)).to_pyarrow_table()
    return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"]))


def settle_all(spark: SparkSession, settings: Settings) -> Rows:
    """Settle all that is in the topic by the real job, and read the ledger."""
    query = settle_events.start(spark, settings, available_now=True)
    assert query.awaitTermination(DRAIN_LIMIT_S), "the query did not end in time"
    return ledger_rows(settings)


@pytest.fixture
def drain(spark: SparkSession, backbone_settings: Settings) -> Callable[[], Rows]:
    """`settle_all` for this test's topic."""
    return functools.partial(settle_all, spark, backbone_settings)
