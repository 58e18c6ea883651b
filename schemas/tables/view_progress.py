"""The progress of the view tables: how much of the ledger they contain. Stored with the table `stream_entries`.

A micro-batch of `build_views` writes the registries first and `stream_entries` last. Every view table is
therefore at or beyond the offsets in the newest commit of `stream_entries`.

Each commit stores the progress twice: as JSON in its metadata, for people and for Spark, and as transaction
versions of Delta (`trunkline/…`), which are part of the table's state. The reader uses the latter for two
reasons. delta-rs 1.6.6 lists the history from the table's end whatever version is loaded, and a progress newer
than the rows would lose changes. Besides, maintenance deletes old commits.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec
from deltalake import CommitProperties, DeltaTable, Transaction

from trunkline_agent.errors import TrunklineError

PROGRESS_KEY: Final = "trunkline"
_LEDGER: Final = f"{PROGRESS_KEY}/ledger_version"
_PARTITIONS: Final = f"{PROGRESS_KEY}/partitions"
_OFFSET: Final = f"{PROGRESS_KEY}/offset/"


class ViewProgress(msgspec.Struct, frozen=True):
    """The progress of the view tables: which records of the log they contain.

    Attributes:
        offsets: for each Kafka partition the first offset that is not in the views. A partition without records
            in the views is absent.
        ledger_version: the newest version of the Delta table `ledger` whose rows are all in the views, or -1.
    """

    offsets: dict[int, int]
    ledger_version: int

    def metadata(self) -> dict[str, str]:
        """Return this progress as metadata for a Delta commit: the key `trunkline` with JSON as its value."""
        # `json.dumps` writes the partitions as texts.
        document = {"offsets": dict(sorted(self.offsets.items())), "ledger_version": self.ledger_version}
        return {PROGRESS_KEY: json.dumps(document)}

    def commit_properties(self) -> CommitProperties:
        """Return the properties with which a commit of the table `stream_entries` stores this progress.

        They contain it twice: as JSON in the metadata, and as Delta transaction versions. They are empty for
        `NO_PROGRESS`, the progress of views without any record. Pass them to delta-rs as the argument
        `commit_properties` of the write.
        """
        if self == NO_PROGRESS:
            return CommitProperties()
        transactions = [
            Transaction(_LEDGER, self.ledger_version),
            Transaction(_PARTITIONS, max(self.offsets, default=-1) + 1),
            *(Transaction(f"{_OFFSET}{partition}", offset) for partition, offset in self.offsets.items()),
        ]
        return CommitProperties(custom_metadata=self.metadata(), app_transactions=transactions)


NO_PROGRESS: Final = ViewProgress({}, -1)


def read_progress(table: DeltaTable) -> ViewProgress:
    """Read the progress of the view tables from the table `stream_entries`.

    Args:
        table: `stream_entries`, loaded at the version whose progress is wanted.

    Returns:
        The progress, or NO_PROGRESS if none is stored yet. If the table has no transaction versions, the
        progress comes from the metadata of its newest commit.

    Raises:
        TrunklineError: that metadata cannot be read.
    """
    ledger_version = table.transaction_version(_LEDGER)
    if ledger_version is None:
        text = table.history(1)[0].get(PROGRESS_KEY)
        if not isinstance(text, str):
            return NO_PROGRESS
        try:
            return msgspec.json.decode(text, type=ViewProgress)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise TrunklineError(
                "the newest commit of stream_entries does not say how far the views are; rebuild_views makes "
                "the tables anew from the ledger"
            ) from None
    partitions = range(table.transaction_version(_PARTITIONS) or 0)
    offsets = {partition: table.transaction_version(f"{_OFFSET}{partition}") for partition in partitions}
    return ViewProgress({p: offset for p, offset in offsets.items() if offset is not None}, ledger_version)
