"""What an audit finds: each finding says what is wrong and where."""

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
    """One thing that is wrong. `text` is for people; the rest says where, as far as it is known: offsets
    `first` to `last` of a partition, the number of the chain's entry, the version that its commit made.
    """

    what: str
    text: str
    partition: int | None = None
    first: int | None = None
    last: int | None = None
    entry: int | None = None
    version: int | None = None

    def fields(self) -> dict[str, Any]:
        """What is known of it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def offsets_text(partition: int, first: int, last: int) -> str:
    """`partition 3, offset 7` or `partition 3, offsets 7 to 9`."""
    return f"partition {partition}, offset{'' if first == last else 's'} {first}" + (
        "" if first == last else f" to {last}"
    )
