"""Checkpoints of the ledger's transaction log, after a number of commits, outside the stream.

A commit reads the part of the log after its newest checkpoint, so checkpoints must be recent (decision 0012).
They are no part of a commit, so no micro-batch waits for them.
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
    """A counter of commits. Pass `committed` to the settling query, and call `write_if_due` regularly."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.table_path(LEDGER)
        # The first checkpoint is written at once, because the number of commits since the last one is unknown.
        self._commits = EVERY_COMMITS

    def committed(self, batch_id: int) -> None:
        """Count a committed micro-batch."""
        self._commits += 1

    def write_if_due(self) -> bool:
        """Write a checkpoint if one is due, and return whether it was written.

        An error is reported, and the next attempt follows after as many commits.
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
