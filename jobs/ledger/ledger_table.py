"""The ledger as a Delta table: its creation, its upgrade to this version's columns, and its checkpoints."""

from __future__ import annotations

import sys
from typing import Final

from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError

from jobs.ledger.ledger_files import SKIPPING_COLUMNS
from schemas.fold.settled import FOLD_VERSION
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW, with_comments
from schemas.tables.fold_version import FOLD_PROPERTY, version_of
from schemas.tables.ledger import LEDGER, LedgerRow

# The least time for which replaced files are kept, because readers may have them open.
KEEP_AT_LEAST_H: Final = 1
EVERY_COMMITS: Final = 100


def keep_old_files_h(settings: Settings) -> int:
    """Return for how many hours replaced files of the tables are kept.

    It is the setting `views.keep_old_files_h`, rounded to whole hours, and at least 1.
    """
    return max(KEEP_AT_LEAST_H, round(settings.views.keep_old_files_h))


def create_ledger(settings: Settings) -> None:
    """Create an empty ledger unless there is one, because a Spark stream cannot read a missing table."""
    path = settings.table_path(LEDGER)
    if not DeltaTable.is_deltatable(path):
        columns = with_comments(LEDGER_ARROW, LedgerRow)
        DeltaTable.create(path, columns, mode="ignore", name=LEDGER, configuration=_properties(settings))


def prepare_ledger(settings: Settings) -> None:
    """Create the ledger, or add to an existing one the columns and table properties that it lacks.

    Call it only while no program appends: an append fails if the table's metadata changes meanwhile.
    """
    create_ledger(settings)
    table = DeltaTable(settings.table_path(LEDGER))
    known = {field.name for field in table.schema().fields}
    columns = Schema.from_arrow(with_comments(LEDGER_ARROW, LedgerRow)).fields
    lacking = [field for field in columns if field.name not in known]
    if lacking:
        table.alter.add_columns(lacking)
    wanted = _properties(settings)
    if FOLD_PROPERTY not in table.metadata().configuration:
        wanted[FOLD_PROPERTY] = str(version_of(table) or FOLD_VERSION)
    if not wanted.items() <= table.metadata().configuration.items():
        table.alter.set_table_properties(wanted, raise_if_not_exists=False)


def _properties(settings: Settings) -> dict[str, str]:
    return {
        "delta.deletedFileRetentionDuration": f"interval {keep_old_files_h(settings)} hours",
        # With tens of thousands of files in the log's folder, each commit is slow.
        "delta.logRetentionDuration": "interval 1 hours",
        # LedgerCheckpoints writes the checkpoints, so that no micro-batch waits for them.
        "delta.checkpointInterval": "10000",
        # build_views reads the change data feed. Appends need no further files for it.
        "delta.enableChangeDataFeed": "true",
        "delta.dataSkippingStatsColumns": ",".join(SKIPPING_COLUMNS),
    }


class LedgerCheckpoints:
    """A writer of Delta checkpoints of the ledger's log, one after every 100 commits.

    A commit reads the part of the log after its newest checkpoint, so checkpoints must be recent (decision
    0012). They are written outside the settling query, so that no micro-batch waits for them. Pass `committed`
    to the settling query as `after_batch`, and call `write_if_due` regularly.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = settings.table_path(LEDGER)
        # The first checkpoint is written at once, because the number of commits since the last one is unknown.
        self._commits = EVERY_COMMITS

    def committed(self, batch_id: int) -> None:
        """Count one committed micro-batch for `write_if_due`. Its number, `batch_id`, is not used."""
        self._commits += 1

    def write_if_due(self) -> bool:
        """Write a Delta checkpoint of the ledger's log if 100 commits were counted since the last one.

        The first call of an object always tries. An error is printed to stderr, and the next attempt follows
        after another 100 commits.

        Returns:
            Whether this call wrote a checkpoint.
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
