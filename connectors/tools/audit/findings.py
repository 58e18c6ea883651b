"""The errors that an audit can find, and a finding with the place of one of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Fault(StrEnum):
    """The kinds of errors that an audit finds in a ledger, its chain or its anchors."""

    ROW_CHANGED = "row_changed"
    ROW_MISSING = "row_missing"
    ROW_ADDED = "row_added"
    ROW_TWICE = "row_twice"
    NEVER_SETTLED = "never_settled"
    FILE_UNREADABLE = "file_unreadable"
    ENTRY_CHANGED = "entry_changed"
    ENTRIES_MISSING = "entries_missing"
    CHAIN_BROKEN = "chain_broken"
    END_CUT_OFF = "end_cut_off"
    ANCHOR_FORGED = "anchor_forged"
    ANCHORS_MISSING = "anchors_missing"
    MADE_ANEW = "made_anew"
    HIDDEN_ROWS = "hidden_rows"


@dataclass(frozen=True)
class Finding:
    """One error in the ledger, its chain or its anchors. A field about its place is None if it is unknown.

    Attributes:
        what: The kind of error.
        text: A description for people.
        partition: The Kafka partition of the offsets.
        first: The first offset.
        last: The last offset.
        entry: The number of the chain's entry.
        version: The version of the ledger that the entry's commit made.
    """

    what: Fault
    text: str
    partition: int | None = None
    first: int | None = None
    last: int | None = None
    entry: int | None = None
    version: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return the finding as a JSON object, without the fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def offsets_text(partition: int, first: int, last: int) -> str:
    """Return a text such as `partition 3, offset 7` or `partition 3, offsets 7 to 9`."""
    return f"partition {partition}, " + (f"offset {first}" if first == last else f"offsets {first} to {last}")
