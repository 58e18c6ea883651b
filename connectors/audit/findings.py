"""The findings of an audit: each one says which error was found, and where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

ROW_CHANGED: Final = "row_changed"
ROW_MISSING: Final = "row_missing"
ROW_ADDED: Final = "row_added"
ROW_TWICE: Final = "row_twice"
NEVER_SETTLED: Final = "never_settled"
FILE_UNREADABLE: Final = "file_unreadable"
ENTRY_CHANGED: Final = "entry_changed"
ENTRIES_MISSING: Final = "entries_missing"
CHAIN_BROKEN: Final = "chain_broken"
END_CUT_OFF: Final = "end_cut_off"
ANCHOR_FORGED: Final = "anchor_forged"
ANCHORS_MISSING: Final = "anchors_missing"
MADE_ANEW: Final = "made_anew"
HIDDEN_ROWS: Final = "hidden_rows"


@dataclass(frozen=True)
class Finding:
    """One error in the ledger or its chain. The fields about its place are None if they are unknown.

    Attributes:
        what: The kind of error, one of the constants above.
        text: A description for people.
        partition: The partition of the offsets.
        first: The first offset.
        last: The last offset.
        entry: The number of the chain's entry.
        version: The version of the table that the entry's commit made.
    """

    what: str
    text: str
    partition: int | None = None
    first: int | None = None
    last: int | None = None
    entry: int | None = None
    version: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields that are known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def offsets_text(partition: int, first: int, last: int) -> str:
    """Return a text such as `partition 3, offset 7` or `partition 3, offsets 7 to 9`."""
    return f"partition {partition}, " + (f"offset {first}" if first == last else f"offsets {first} to {last}")
