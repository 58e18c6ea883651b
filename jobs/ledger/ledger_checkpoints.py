"""Keeps the ledger's transaction log short: a checkpoint every so many commits, beside the stream.

A commit reads what came after the log's newest checkpoint, so there must be young ones (decision 0012). They
are no part of a commit: nothing waits for them.
"""

from __future__ import annotations

import sys
from typing import Final

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from schemas.settings.settings import Settings
from schemas.tables.ledger import LEDGER

EVERY_COMMITS: Final = 100


class LedgerCheckpoints:
    """Give `committed` to the settling query, and call `write_if_due` now and then, on one thread."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.table_path(LEDGER)
        # The first at once: nobody knows how many commits the last run has left.
        self._commits = EVERY_COMMITS

    def committed(self, batch_id: int) -> None:
        """A micro-batch is in the table."""
        self._commits += 1

    def write_if_due(self) -> bool:
        """Write a checkpoint if it is time for one; returns whether it did. What fails is told, and tried again
        after as many commits.
        """
        if self._commits < EVERY_COMMITS:
            return False
        self._commits = 0
        try:
            DeltaTable(self._path).create_checkpoint()
        except (DeltaError, OSError) as error:
            print(f"ledger_checkpoints: {type(error).__name__}: {error}", file=sys.stderr)
            return False
        return True
