"""The ledger as a Delta table: its creation, and its upgrade to this version's columns before any append."""

from __future__ import annotations

from typing import Final

from deltalake import DeltaTable, Schema

from jobs.ledger.ledger_files import SKIPPING_COLUMNS
from schemas.fold.settled import FOLD_VERSION
from schemas.settings.settings import Settings
from schemas.tables.fold_version import FOLD_PROPERTY, version_of
from schemas.tables.ledger import LEDGER
from schemas.tables.ledger_arrow import LEDGER_ARROW

# The least time for which replaced files are kept, because readers may have them open.
KEEP_AT_LEAST_H: Final = 1


def keep_old_files_h(settings: Settings) -> int:
    """Return for how many hours replaced files are kept."""
    return max(KEEP_AT_LEAST_H, round(settings.views.keep_old_files_h))


def create_ledger(settings: Settings) -> None:
    """Make an empty ledger if there is none, because a stream cannot read a missing table."""
    path = settings.table_path(LEDGER)
    if not DeltaTable.is_deltatable(path):
        DeltaTable.create(path, LEDGER_ARROW, mode="ignore", name=LEDGER, configuration=_properties(settings))


def prepare_ledger(settings: Settings) -> None:
    """Make the ledger, or add the columns and properties that an existing one lacks.

    Call it only while no program appends: an append fails if the table's metadata changes meanwhile.
    """
    create_ledger(settings)
    table = DeltaTable(settings.table_path(LEDGER))
    known = {field.name for field in table.schema().fields}
    lacking = [field for field in Schema.from_arrow(LEDGER_ARROW).fields if field.name not in known]
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
        # ledger_checkpoints.py writes the checkpoints, so that no micro-batch waits for them.
        "delta.checkpointInterval": "10000",
        # build_views reads the change data feed. Appends need no further files for it.
        "delta.enableChangeDataFeed": "true",
        "delta.dataSkippingStatsColumns": ",".join(SKIPPING_COLUMNS),
    }
