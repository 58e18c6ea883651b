"""The `foreachBatch` sink that settles each micro-batch and commits its files to the ledger exactly once.

Every start of the query begins at the ledger's end, and the tasks refuse records from anywhere else. So no
micro-batch that is committed is ever settled again. A commit that another settling job has made in between is
found before our own, which then fails (decision 0029).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, Row

from jobs.driver.programs import name_of, writer_of
from jobs.ledger.ledger_chain import PLAN_PROPERTY, BatchPlan, LedgerChain, PlanKeeper
from jobs.settling.log_checks import check_gaps
from schemas.integrity.audit_chain import ChainEntry, commit_metadata, line_in_metadata, user_metadata
from schemas.settings.settings import Settings
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import TrunklineError

# ledger_table.py and maintain_tables.py do both, so that no micro-batch waits for them.
_NOTHING_MORE: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
# The number of attempts for a commit that conflicts with commits of maintenance.
_TRIES: Final = 20


class SecondWriter(TrunklineError):
    """Another settling job has committed to the ledger. This one must stop."""


def commit_marker(query_id: str, batch_id: int, entry: ChainEntry, batch_ms: int | None = None) -> str:
    """Return the text for a Delta commit's metadata `userMetadata`: its micro-batch, and its chain entry.

    Args:
        query_id: The id of the query. Each start has a new one.
        batch_id: The number of the micro-batch.
        entry: The commit's entry of the audit chain.
        batch_ms: How long the micro-batch took, in ms, for `/metrics`. None: not measured.
    """
    more = {} if batch_ms is None else {"batch_ms": batch_ms}
    known = {"query": query_id, "batch": batch_id, "audit": commit_metadata(entry)}
    return json.dumps(known | more, sort_keys=True)


class LedgerSink:
    """A `foreachBatch` function that settles each micro-batch and commits its files. Not thread-safe.

    The frames have the columns of LEDGER_FILE. Their evaluation in Spark settles the records and writes the
    data files. The first micro-batch waits up to 60 seconds for `started`, because Spark knows the query's id
    only after the start.

    Args:
        settings: The settings of the tables.
        after_batch: Called with the micro-batch's number when the micro-batch is in the table. None: nothing
            is called.
    """

    def __init__(self, settings: Settings, after_batch: Callable[[int], None] | None = None) -> None:
        path = settings.table_path(LEDGER)
        self._kafka = settings.kafka
        self._storage = table_storage(path)
        self._table = DeltaTable(path)
        self._seen = self._table.version()
        self._writer = writer_of(self._table)
        self._chain = LedgerChain(settings)
        self._keeper = PlanKeeper(self._chain.head, self._chain.places())
        self._after_batch = after_batch
        self._query_id = ""
        self._known = threading.Event()

    @property
    def ends(self) -> dict[int, int]:
        """The first offset of each partition that is not in the ledger. Partitions without rows are absent."""
        return self._chain.ends

    def started(self, query_id: str) -> None:
        """Set the id of the query, and let the first micro-batch run. Call it when the query has started."""
        self._query_id = query_id
        self._known.set()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Settle the micro-batch, and commit its files.

        Args:
            frame: The micro-batch's frame, with the columns of LEDGER_FILE. It is evaluated once.
            batch_id: The number that Spark gave the micro-batch.

        Raises:
            OrderError: Records between the ledger's end and the micro-batch were left out.
            RuntimeError: `started` was not called within 60 seconds.
            SecondWriter: Another settling job has committed to the ledger.
        """
        if not self._known.wait(timeout=60):
            raise RuntimeError("the sink does not know its query: call started(query.id)")
        began = time.monotonic()
        # Spark hands the property to each task of this thread's jobs.
        frame.sparkSession.sparkContext.setLocalProperty(PLAN_PROPERTY, self.next_plan().text())
        files = frame.collect()
        if files:
            self.commit(files, batch_id, began)
        if self._after_batch is not None:
            self._after_batch(batch_id)

    def next_plan(self) -> BatchPlan:
        """Return the ledger's end and its latest commits, for the tasks of the next micro-batch.

        Raises:
            SecondWriter: Another settling job has committed to the ledger.
        """
        self._follow()
        return self._keeper.plan(self._seen)

    def commit(self, files: Sequence[Row], batch_id: int, began: float | None = None) -> None:
        """Commit `files` to the table as one micro-batch.

        Args:
            files: Rows of LEDGER_FILE: the written data files that become part of the table.
            batch_id: The number of the micro-batch.
            began: When the micro-batch began, by `time.monotonic()`. None: the commit names no duration.

        Raises:
            OrderError: Records between the ledger's end and the micro-batch were left out.
            SecondWriter: Another settling job has committed to the ledger.
            CommitFailedError: The commit conflicts with commits of maintenance, 20 times.
        """
        entry = self._chain.entry(self._query_id, batch_id, [file.roots for file in files])
        check_gaps(self._kafka, self._chain.ends, entry.partitions)
        took_ms = None if began is None else round((time.monotonic() - began) * 1000)
        marker = commit_marker(self._query_id, batch_id, entry, took_ms)
        for attempt in range(1, _TRIES + 1):
            try:
                self._commit_at_end(files, marker)
            except CommitFailedError:
                if attempt == _TRIES:
                    raise
                if self._follow(entry):
                    break
            else:
                break
        self._chain.committed(entry)
        self._keeper.committed(entry, [(file.path, file.roots) for file in files])

    def _follow(self, mine: ChainEntry | None = None) -> bool:
        """Read the table's newest version, and return whether `mine` is among the commits that were not seen.

        An object store may have written a commit and lost its answer, so that it seems to have failed.

        Raises:
            SecondWriter: Another job has committed a micro-batch, or has claimed the ledger.
        """
        self._table.update_incremental()
        if (writer := writer_of(self._table)) != self._writer:
            raise SecondWriter(f"another process has taken over ({name_of(writer)})")
        is_there = False
        for version in range(self._seen + 1, self._table.version() + 1):
            metadata = user_metadata(self._storage, version)
            line = None if metadata is None else line_in_metadata(metadata, version)
            if line is not None and line.entry == mine:
                is_there = True
            elif line is not None:
                raise SecondWriter(
                    f"the ledger's version {version} is a micro-batch of another settling job (query "
                    f"{line.entry.query}): only one may run"
                )
        self._seen = self._table.version()
        return is_there

    def _commit_at_end(self, files: Sequence[Row], marker: str) -> None:
        """Commit the files as the version after the one that was read, or fail if there is such a version."""
        now = round(time.time() * 1000)
        adds: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, now, True, file.statistics) for file in files
        ]
        self._table.create_write_transaction(
            adds,
            mode="append",
            schema=self._table.schema(),
            commit_properties=CommitProperties({"userMetadata": marker}, max_commit_retries=0),
            post_commithook_properties=_NOTHING_MORE,
        )
        # Without retries, delta-rs makes this version or fails.
        self._seen += 1
