"""Exactly once into a Delta table, from `foreachBatch`: the batch id rides in the commit it belongs to.

Delta's own sink reaches the same with a transaction version, at the price of building the table's snapshot
again in every micro-batch (decision 0003). Here only the first micro-batch after a start can be a repeated
one, so only that one looks back at the newest commits. It holds for one writer a table.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

# More commits than maintenance can put between a micro-batch and its repetition.
_LOOK_BACK: Final = 1000
_SKIP_EMPTY: Final = "spark.databricks.delta.skipRecordingEmptyCommits"


def commit_marker(query_id: str, batch_id: int) -> str:
    """What stands in a commit's userMetadata. The query's id lives in its checkpoint: a new checkpoint, in
    which batch ids start anew, has new markers."""
    return json.dumps({"query": query_id, "batch": batch_id}, sort_keys=True)


class LastCommit(NamedTuple):
    """The newest micro-batch in a table, and the query that wrote it."""

    query_id: str
    batch_id: int


def last_commit(spark: SparkSession, path: str, query_id: str | None = None) -> LastCommit | None:
    """The newest micro-batch (of this query, if one is named) that is in the table, or None."""
    if not DeltaTable.isDeltaTable(spark, path):
        return None
    rows = (
        DeltaTable.forPath(spark, path)
        .history(_LOOK_BACK)
        .where(F.col("userMetadata").contains(f'"query": "{query_id or ""}'))
        .orderBy(F.col("version").desc())
        .select("userMetadata")
        .limit(1)
        .collect()
    )
    if not rows:
        return None
    marker = json.loads(rows[0][0])
    return LastCommit(marker["query"], int(marker["batch"]))


class OnceSink:
    """`foreachBatch` function that appends each micro-batch in one commit, once.

    `query_id` is set after the query has started (Spark tells the id only then); the first micro-batch
    waits for it. `before_batch` is called before anything is written and may raise to stop the query;
    `after_batch` is called with the batch id when a batch is in the table.
    """

    def __init__(
        self,
        path: str,
        after_batch: Callable[[int], None] | None = None,
        before_batch: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._before_batch = before_batch
        self._after_batch = after_batch
        self._query_id: str | None = None
        self._known = threading.Event()
        self._looked_back = False
        self._appended = False

    def started(self, query_id: str) -> None:
        """Tell the sink which query it serves."""
        self._query_id = query_id
        self._known.set()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Append `frame` unless this batch is in the table already."""
        if not self._known.wait(timeout=60):
            raise RuntimeError("the sink was never told its query: call started(query.id)")
        assert self._query_id is not None  # noqa: S101  for the type checker
        if self._before_batch is not None:
            self._before_batch()
        if self._looked_back:
            repeated = False
        else:
            # An empty micro-batch has its commit as well: a start compares its checkpoint with the table.
            frame.sparkSession.conf.set(_SKIP_EMPTY, "false")
            last = last_commit(frame.sparkSession, self._path, self._query_id)
            repeated = last is not None and last.batch_id >= batch_id
        if repeated:
            # In the table, but the state has not advanced: settle again, write nothing.
            frame.write.format("noop").mode("overwrite").save()
        else:
            marker = commit_marker(self._query_id, batch_id)
            writer = frame.write.format("delta").mode("append").option("userMetadata", marker)
            if not self._appended:
                # A table from before a new column gets it now; later appends need not compare again.
                writer = writer.option("mergeSchema", "true")
            writer.save(self._path)
            self._appended = True
        self._looked_back = True
        if self._after_batch is not None:
            self._after_batch(batch_id)
