"""Makes the audit chain's entry for each commit of the settling query, bound to the entry before.

Reads: the ledger's log and the chain file, once at a start.
Guarantees: the chain has one entry for each commit of a micro-batch, in order, also after a crash, a lost
checkpoint or a new query. This requires a single settling job for each ledger.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltalake import DeltaTable

from jobs.views.view_changes import ends_of
from schemas.errors import TrunklineError
from schemas.integrity.audit_chain import (
    ChainEntry,
    FirstEntry,
    PartitionRoot,
    last_in_file,
    lines_in_log,
    newest_entry,
    next_entry,
    read_roots,
)
from schemas.integrity.audit_files import chain_file
from schemas.settings.settings import Settings
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger import LEDGER


class LedgerChain:
    """The newest entry of the ledger's audit chain, from which the next commit's entry is made.

    Each start of the settling query makes a new object. The first call of a method reads the chain from disk.
    Not thread-safe.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._head: ChainEntry | FirstEntry | None = None

    def holds(self, query: str, batch: int, roots: Iterable[str]) -> bool:
        """Return whether the ledger already has this micro-batch, so that it must not be committed again.

        This happens if Spark was killed after the ledger's commit and before its own, and now repeats the
        micro-batch. The offsets in `roots` decide. Without roots, the query and the number decide.

        Args:
            query: The id of the query.
            batch: The number of the micro-batch.
            roots: The Merkle roots of the micro-batch's files, as `FileRoots.to_json` returned them.

        Raises:
            TrunklineError: The ledger has some of the micro-batch's offsets but not all.
        """
        head, brought = self._newest(), read_roots(roots)
        ends = head.start if isinstance(head, FirstEntry) else head.ends
        if not brought:
            return isinstance(head, ChainEntry) and (head.query, head.batch) == (query, batch)
        known = [root.last < ends.get(root.partition, 0) for root in brought]
        if all(known):
            return True
        if any(known) or any(root.first < ends.get(root.partition, 0) for root in brought):
            raise TrunklineError(
                f"micro-batch {batch} brings {_places(brought)}; the ledger has a part of it already, and ends "
                f"before {ends}: another settling job has written to it, or the checkpoint is of another ledger"
            )
        return False

    def entry(self, query: str, batch: int, roots: Iterable[str]) -> ChainEntry:
        """Return the audit chain's entry for the ledger's next commit.

        Call `committed` with it after the commit.

        Args:
            query: The id of the query.
            batch: The number of the micro-batch.
            roots: The Merkle roots of the micro-batch's files, as `FileRoots.to_json` returned them.
        """
        return next_entry(self._newest(), query, batch, roots)

    def _newest(self) -> ChainEntry | FirstEntry:
        if self._head is None:
            self._head = _find_head(self._settings)
        return self._head

    def committed(self, entry: ChainEntry) -> None:
        """Make `entry` the newest one of the audit chain, after its commit to the ledger has succeeded."""
        self._head = entry


def _find_head(settings: Settings) -> ChainEntry | FirstEntry:
    """Return the chain's newest entry. After an hour, entries may be in the chain file alone."""
    path = settings.table_path(LEDGER)
    table = DeltaTable(path)
    known = last_in_file(chain_file(settings, str(table.metadata().id)))
    lines = lines_in_log(table_storage(path), -1 if known is None else known.version).lines
    found = newest_entry(None if known is None else known.entry, lines)
    # A ledger may be older than its chain, which then starts at the ledger's end.
    return FirstEntry(str(table.metadata().id), ends_of(table)) if found is None else found


def _places(roots: Iterable[PartitionRoot]) -> str:
    return ", ".join(f"offsets {root.first} to {root.last} of partition {root.partition}" for root in roots)
