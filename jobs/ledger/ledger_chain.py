"""The head of the audit chain, as the settling query needs it: the next commit's entry names the one before.

Reads: the ledger's log and the chain file, once at a start.
Guarantees: the chain has one entry for each commit of a micro-batch, in their order, also after a crash, a lost
checkpoint or a new query. It holds for one settling job a ledger, as all of the ledger does.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from deltalake import DeltaTable

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
from schemas.tables.delta_files import dataset_of, table_storage
from schemas.tables.ledger import LEDGER


class LedgerChain:
    """Gives each micro-batch's entry; one for each start of the query."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._head: ChainEntry | FirstEntry | None = None

    def holds(self, query: str, batch: int, roots: Iterable[str]) -> bool:
        """Whether this micro-batch, whose tasks handed on `roots`, is in the ledger: its offsets lie before the
        chain's end. Raises TrunklineError when some of them do and others do not.
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
        """The entry of the micro-batch that is about to be committed, whose tasks handed on `roots`."""
        return next_entry(self._newest(), query, batch, roots)

    def _newest(self) -> ChainEntry | FirstEntry:
        if self._head is None:
            self._head = _find_head(self._settings)
        return self._head

    def committed(self, entry: ChainEntry) -> None:
        """Its micro-batch is in the table."""
        self._head = entry


def _find_head(settings: Settings) -> ChainEntry | FirstEntry:
    """The chain's newest entry. The log is cleaned after an hour, of nothing that the chain file has not."""
    path = settings.table_path(LEDGER)
    table = DeltaTable(path)
    known = last_in_file(chain_file(settings, str(table.metadata().id)))
    lines = lines_in_log(table_storage(path), -1 if known is None else known.version).lines
    found = newest_entry(None if known is None else known.entry, lines)
    return FirstEntry(str(table.metadata().id), _ends(table)) if found is None else found


def _places(roots: Iterable[PartitionRoot]) -> str:
    return ", ".join(f"offsets {root.first} to {root.last} of partition {root.partition}" for root in roots)


def _ends(table: DeltaTable) -> dict[int, int]:
    """The first offset of each partition that is not in the ledger: of one that is older than its chain."""
    ends: dict[int, int] = {}
    for batch in dataset_of(table).scanner(columns=["partition", "offset"]).to_batches():
        found = pa.table(batch).group_by("partition").aggregate([("offset", "max")])
        for row in found.to_pylist():
            ends[row["partition"]] = max(ends.get(row["partition"], 0), row["offset_max"] + 1)
    return dict(sorted(ends.items()))
