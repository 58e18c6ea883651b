"""The head of the audit chain, as the settling query needs it: the next commit's entry names the one before.

Reads: the ledger's log and the chain file, once at a start.
Guarantees: the chain has one entry for each commit of a micro-batch, in their order, also after a crash, a lost
checkpoint or a new query. It holds for one settling job a ledger, as all of the ledger does.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from deltalake import DeltaTable

from schemas.audit_chain import ChainEntry, FirstEntry, last_in_file, lines_in_log, next_entry
from schemas.audit_settings import chain_file
from schemas.delta_files import dataset_of, table_storage
from schemas.ledger import LEDGER
from schemas.settings import Settings


class LedgerChain:
    """Gives each micro-batch's entry; one for each start of the query."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._head: ChainEntry | FirstEntry | None = None

    def entry(self, query: str, batch: int, roots: Iterable[str]) -> ChainEntry:
        """The entry of the micro-batch that is about to be committed, whose tasks handed on `roots`."""
        if self._head is None:
            self._head = _find_head(self._settings)
        return next_entry(self._head, query, batch, roots)

    def committed(self, entry: ChainEntry) -> None:
        """Its micro-batch is in the table."""
        self._head = entry


def _find_head(settings: Settings) -> ChainEntry | FirstEntry:
    """The entry of the newest commit that has one. The log is cleaned after an hour, never before the chain
    file has what is in it.
    """
    path = settings.table_path(LEDGER)
    table = DeltaTable(path)
    known = last_in_file(chain_file(settings, str(table.metadata().id)))
    newer = lines_in_log(table_storage(path), -1 if known is None else known.version).lines
    if newer:
        return newer[-1].entry
    return FirstEntry(str(table.metadata().id), _ends(table)) if known is None else known.entry


def _ends(table: DeltaTable) -> dict[int, int]:
    """The first offset of each partition that is not in the ledger: of one that is older than its chain."""
    ends: dict[int, int] = {}
    for batch in dataset_of(table).scanner(columns=["partition", "offset"]).to_batches():
        found = pa.table(batch).group_by("partition").aggregate([("offset", "max")])
        for row in found.to_pylist():
            ends[row["partition"]] = max(ends.get(row["partition"], 0), row["offset_max"] + 1)
    return dict(sorted(ends.items()))
