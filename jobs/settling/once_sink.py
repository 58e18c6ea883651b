"""The `foreachBatch` sink that commits each micro-batch to the ledger exactly once.

Delta's own sink does the same with a transaction version, but builds the table's snapshot again in every
micro-batch (decision 0003). Here only the first micro-batch after a start can be a repeated one. So only that
one checks whether the audit chain already has its offsets. This requires a single writer of micro-batches for
each table.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, Row

from jobs.ledger.ledger_chain import LedgerChain
from schemas.integrity.audit_chain import ChainEntry, Number, commit_metadata, line_in_metadata

# More than the number of commits of maintenance between a micro-batch and its repetition.
_LOOK_BACK: Final = 1000
# ledger_table.py and maintain_tables.py do both, so that no micro-batch waits for them.
_NOTHING_MORE: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
# The number of attempts for a commit that conflicts with commits of maintenance.
_TRIES: Final = 20


def commit_marker(
    query_id: str, batch_id: int, entry: ChainEntry | None = None, batch_ms: int | None = None
) -> str:
    """Return the text that marks a Delta commit with its micro-batch, for the commit's metadata `userMetadata`.

    A new checkpoint has a new query id. So its markers differ although its micro-batches are numbered from 0
    again.

    Args:
        query_id: The id of the query, which its checkpoint contains.
        batch_id: The number of the micro-batch.
        entry: The commit's entry of the audit chain. None: the marker has none.
        batch_ms: How long the micro-batch took, in ms, for `/metrics`. None: not measured.
    """
    more: dict[str, object] = {} if entry is None else {"audit": commit_metadata(entry)}
    if batch_ms is not None:
        more["batch_ms"] = batch_ms
    return json.dumps({"query": query_id, "batch": batch_id, **more}, sort_keys=True)


class LastCommit(msgspec.Struct, frozen=True):
    """The newest micro-batch that was committed to a table, and the query that wrote it."""

    query_id: str = msgspec.field(name="query")
    batch_id: Number = msgspec.field(name="batch")


def last_commit(path: str, query_id: str | None = None) -> LastCommit | None:
    """Return the newest micro-batch in the table's history, or None if there is no table or no such commit.

    The history is the last 1,000 commits. Commits without a marker (`commit_marker`) are skipped. A marker
    without an entry of the audit chain counts only if no other marker has one, because another program could
    have written it.

    Args:
        path: The path or URI of the table.
        query_id: Only look for commits of this query. None: of any query.
    """
    if not DeltaTable.is_deltatable(path):
        return None
    older = None
    for commit in DeltaTable(path).history(_LOOK_BACK):
        text: Any = commit.get("userMetadata")
        marker = _marker_in(text)
        if marker is None or query_id not in (None, marker.query_id):
            continue
        line = line_in_metadata(text, 0)
        if line is not None and LastCommit(line.entry.query, line.entry.batch) == marker:
            return marker
        older = older or marker
    return older


def _marker_in(text: Any) -> LastCommit | None:
    try:
        return msgspec.json.decode(text, type=LastCommit)
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        return None


class OnceSink:
    """A `foreachBatch` function that writes each micro-batch's ledger files and commits them exactly once.

    The frames have the columns of LEDGER_FILE. Their evaluation in Spark writes the data files. The first
    micro-batch waits up to 60 seconds for `started`, because Spark knows the query's id only after the start.

    Args:
        path: The path or URI of the table.
        after_batch: Called with the micro-batch's number when the micro-batch is in the table.
        before_batch: Called before any write. It may raise to stop the query.
        chain: Makes the audit chain's entry for each commit. None: commits have no entries.
    """

    def __init__(
        self,
        path: str,
        after_batch: Callable[[int], None] | None = None,
        before_batch: Callable[[], None] | None = None,
        chain: LedgerChain | None = None,
    ) -> None:
        self._path = path
        self._chain = chain
        self._before_batch = before_batch
        self._after_batch = after_batch
        self._query_id = ""
        self._known = threading.Event()
        self._looked_back = False
        self._table: DeltaTable | None = None

    def started(self, query_id: str) -> None:
        """Set the id of the query, and let the first micro-batch run. Call it when the query has started."""
        self._query_id = query_id
        self._known.set()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Settle the micro-batch, and commit its files unless it is already in the table.

        An empty micro-batch is committed, too, because a start compares the checkpoint with the table.

        Args:
            frame: The micro-batch's frame, with the columns of LEDGER_FILE.
            batch_id: The number that Spark gave the micro-batch.

        Raises:
            RuntimeError: `started` was not called within 60 seconds.
        """
        if not self._known.wait(timeout=60):
            raise RuntimeError("the sink does not know its query: call started(query.id)")
        began = time.monotonic()
        if self._before_batch is not None:
            self._before_batch()
        files, repeated = frame.collect(), False
        if not self._looked_back:
            repeated = self._is_in_table(batch_id, files)
        # A repeated micro-batch was settled again to update the state, and its files are not used.
        if not repeated:
            self.commit(files, batch_id, began)
        self._looked_back = True
        if self._after_batch is not None:
            self._after_batch(batch_id)

    def _is_in_table(self, batch_id: int, files: Sequence[Row]) -> bool:
        if self._chain is not None:
            return self._chain.holds(self._query_id, batch_id, [file.roots for file in files])
        last = last_commit(self._path, self._query_id)
        return last is not None and last.batch_id >= batch_id

    def commit(self, files: Sequence[Row], batch_id: int, began: float | None = None) -> None:
        """Commit `files` to the table as one micro-batch, without a check whether the table already has it.

        A commit that conflicts with commits of maintenance is tried 20 times, then delta-rs raises an error.

        Args:
            files: Rows of LEDGER_FILE: the written data files that become part of the table.
            batch_id: The number of the micro-batch.
            began: When the micro-batch began, by `time.monotonic()`. None: the commit names no duration.
        """
        entry = None
        if self._chain is not None:
            entry = self._chain.entry(self._query_id, batch_id, [file.roots for file in files])
        took_ms = None if began is None else round((time.monotonic() - began) * 1000)
        marker = commit_marker(self._query_id, batch_id, entry, took_ms)
        now = round(time.time() * 1000)
        adds: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, now, True, file.statistics) for file in files
        ]
        table = self._newest_table()
        table.create_write_transaction(
            adds,
            mode="append",
            schema=table.schema(),
            commit_properties=CommitProperties({"userMetadata": marker}, max_commit_retries=_TRIES),
            post_commithook_properties=_NOTHING_MORE,
        )
        if self._chain is not None and entry is not None:
            self._chain.committed(entry)

    def _newest_table(self) -> DeltaTable:
        """Return the table at its newest version.

        To follow the log takes half as long as to read it from the last checkpoint (decision 0012).
        """
        if self._table is None:
            self._table = DeltaTable(self._path)
        else:
            self._table.update_incremental()
        return self._table
