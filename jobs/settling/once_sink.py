"""Exactly once into the ledger, from `foreachBatch`: the batch id rides in the commit it belongs to.

Delta's own sink reaches the same with a transaction version, at the price of building the table's snapshot
again in every micro-batch (decision 0003). Here only the first micro-batch after a start can be a repeated
one, so only that one looks back: whether the audit chain has gone past its offsets. It holds for one writer of
micro-batches a table.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, Row

from jobs.ledger.ledger_chain import LedgerChain
from schemas.integrity.audit_chain import ChainEntry, Number, commit_metadata, line_in_metadata

# More commits than maintenance can put between a micro-batch and its repetition.
_LOOK_BACK: Final = 1000
# ledger_checkpoints.py and maintain_tables.py do both, where no micro-batch waits for them.
_NOTHING_MORE: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
# How often a commit that lost the race to one of maintenance is tried at the next version.
_TRIES: Final = 20


def commit_marker(
    query_id: str, batch_id: int, entry: ChainEntry | None = None, batch_ms: int | None = None
) -> str:
    """Return a commit's userMetadata: query and micro-batch, its entry of the audit chain, and for `/metrics`
    how many milliseconds the micro-batch took to its commit. The query's id lives in its checkpoint: a new
    checkpoint, in which batch ids start anew, has new markers.
    """
    more: dict[str, object] = {} if entry is None else {"audit": commit_metadata(entry)}
    if batch_ms is not None:
        more["batch_ms"] = batch_ms
    return json.dumps({"query": query_id, "batch": batch_id, **more}, sort_keys=True)


class LastCommit(NamedTuple):
    """The newest micro-batch in a table, and the query that wrote it."""

    query_id: str
    batch_id: int


class _Marker(msgspec.Struct):
    query: str
    batch: Number


def last_commit(path: str, query_id: str | None = None) -> LastCommit | None:
    """The newest micro-batch (of this query, if one is named) that is in the table, or None. Metadata of others
    is passed over; a marker without an entry of the audit chain counts only where none has one.
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
        if line is not None and (line.entry.query, line.entry.batch) == marker:
            return marker
        older = older or marker
    return older


def _marker_in(text: Any) -> LastCommit | None:
    try:
        marker = msgspec.json.decode(text, type=_Marker)
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        return None
    return LastCommit(marker.query, marker.batch)


class OnceSink:
    """`foreachBatch` function that commits the files of each micro-batch, once: frames have the columns of
    LEDGER_FILE, and running one writes its files.

    `query_id` is set after the query has started (Spark tells the id only then); the first micro-batch
    waits for it. `before_batch` is called before anything is written and may raise to stop the query;
    `after_batch` is called with the batch id when a batch is in the table. `chain` gives each commit
    its entry; without it there is none.
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
        self._query_id: str | None = None
        self._known = threading.Event()
        self._looked_back = False
        self._table: DeltaTable | None = None

    def started(self, query_id: str) -> None:
        """Tell the sink which query it serves."""
        self._query_id = query_id
        self._known.set()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Settle the micro-batch, and commit its files unless it is in the table already. An empty one has its
        commit as well: a start compares its checkpoint with the table.
        """
        if not self._known.wait(timeout=60):
            raise RuntimeError("the sink was never told its query: call started(query.id)")
        assert self._query_id is not None  # noqa: S101  for the type checker
        began = time.monotonic()
        if self._before_batch is not None:
            self._before_batch()
        files, repeated = frame.collect(), False
        if not self._looked_back:
            repeated = self._is_in_table(batch_id, files)
        # In the table, but the state had not advanced: settled again for its sake, and the files are left over.
        if not repeated:
            self.commit(files, batch_id, began)
        self._looked_back = True
        if self._after_batch is not None:
            self._after_batch(batch_id)

    def _is_in_table(self, batch_id: int, files: Sequence[Row]) -> bool:
        assert self._query_id is not None  # noqa: S101  for the type checker
        if self._chain is not None:
            return self._chain.holds(self._query_id, batch_id, [file.roots for file in files])
        last = last_commit(self._path, self._query_id)
        return last is not None and last.batch_id >= batch_id

    def commit(self, files: Sequence[Row], batch_id: int, began: float | None = None) -> None:
        """Make `files` a part of the table, as one micro-batch that began at `began` (monotonic clock)."""
        assert self._query_id is not None  # noqa: S101  for the type checker
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
        """The table at its newest version. To follow the log takes half as long as to read the last checkpoint
        and what came after it (decision 0012).
        """
        if self._table is None:
            self._table = DeltaTable(self._path)
        else:
            self._table.update_incremental()
        return self._table
