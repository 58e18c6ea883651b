"""Reduces ledger rows to the changes of the view tables: the last change of each row and of each entry."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES, VIEWS
from schemas.tables.delta_files import dataset_of

# The columns of the ledger to read.
CHANGE_COLUMNS: Final = (
    "partition",
    "offset",
    "stream_kind",
    "stream_id",
    "fold_version",
    "changes",
    "entries",
    "accepted_offset",
)
ENTRY_KEY: Final = ("stream_kind", "stream_id", "entry")

Key = tuple[str, ...]
"""The values of a table's key columns."""


def key_columns(table: str) -> tuple[str, ...]:
    """Return the names of the columns that identify a row of the view table named `table`."""
    return ENTRY_KEY if table == STREAM_ENTRIES else VIEWS[table].KEY


class RowChange(NamedTuple):
    """The state of one view row after the record at `offset` of `partition`.

    `row` has the cells without the columns `partition` and `last_offset`. None: the record removed the row.
    """

    partition: int
    offset: int
    row: dict[str, Any] | None


class Changes(NamedTuple):
    """The result of `changes_of`.

    `tables` has the last change of each row, by table and key. `next_offsets` has for each Kafka partition the
    offset after the last ledger row that was read.
    """

    tables: dict[str, dict[Key, RowChange]]
    next_offsets: dict[int, int]


class _JsonChange(msgspec.Struct):
    view: str
    key: str
    offset: int
    row: dict[str, Any] | None


_decode_changes: Final = msgspec.json.Decoder(list[_JsonChange]).decode


def changes_of(ledger: pa.Table) -> Changes:
    """Reduce ledger rows to the last change of each view row and each entry of a stream, and return these.

    Args:
        ledger: Ledger rows in any order, with the columns CHANGE_COLUMNS.
    """
    tables: dict[str, dict[Key, RowChange]] = {table: {} for table in VIEW_TABLES}
    changed = ledger.filter(pc.or_(pc.is_valid(ledger["changes"]), pc.is_valid(ledger["entries"])))
    for row in changed.to_pylist():
        partition = row["partition"]
        for view, key, change in row_changes(partition, row["changes"]):
            _keep(tables[view], key, change)
        kind, stream, version = sys.intern(row["stream_kind"]), row["stream_id"], row["fold_version"]
        for entry, value in row["entries"] or ():
            key = (kind, stream, sys.intern(entry))
            cells = (*key, value, version)
            document = (
                None if value is None else dict(zip((*ENTRY_KEY, "value", "fold_version"), cells, strict=True))
            )
            _keep(tables[STREAM_ENTRIES], key, RowChange(partition, row["accepted_offset"], document))
    return Changes(tables, next_offsets(ledger))


def row_changes(partition: int, changes: bytes | str | None) -> Iterator[tuple[str, Key, RowChange]]:
    """Yield table name, key and change for each view row that a ledger row changed.

    Args:
        partition: The ledger row's Kafka partition.
        changes: The ledger row's cell `changes`: a JSON list, or None if no view row changed.
    """
    for change in _decode_changes(changes or b"[]"):
        yield change.view, row_key(change.view, change.key), RowChange(partition, change.offset, change.row)


def row_key(view: str, key: str) -> Key:
    """Split a view row's key, such as `<realm>/<agent>`, into the values of the view's key columns.

    Only the last value may contain a slash.
    """
    return tuple(key.split("/", len(key_columns(view)) - 1))


def next_offsets(ledger: pa.Table) -> dict[int, int]:
    """Return the offset after the highest one among these ledger rows, by Kafka partition."""
    highest = ledger.select(["partition", "offset"]).group_by("partition").aggregate([("offset", "max")])
    return {row["partition"]: row["offset_max"] + 1 for row in highest.to_pylist()}


def ends_of(ledger: DeltaTable) -> dict[int, int]:
    """Return the offset after the highest one in the ledger, by Kafka partition in ascending order.

    The call reads two columns of the whole ledger. A partition without rows is left out.
    """
    ends: dict[int, int] = {}
    for batch in dataset_of(ledger).to_batches(columns=["partition", "offset"]):
        ends = newest(ends, next_offsets(pa.Table.from_batches([batch])))
    return dict(sorted(ends.items()))


def newest(known: Mapping[int, int], found: Mapping[int, int]) -> dict[int, int]:
    """Merge two maps from Kafka partition to offset; the higher offset wins."""
    return {**known, **{number: max(offset, known.get(number, 0)) for number, offset in found.items()}}


def _keep(changes: dict[Key, RowChange], key: Key, change: RowChange) -> None:
    known = changes.get(key)
    if known is None or known.offset < change.offset:
        changes[key] = change
