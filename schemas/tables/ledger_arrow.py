"""The ledger's columns as Arrow types, and the conversion of ledger rows to an Arrow batch and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from itertools import repeat
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables.ledger import COLUMNS, LedgerRow
from schemas.tables.row_columns import MOMENT, columns_of
from trunkline_agent.wire.field_checks import is_utc_timestamp

if TYPE_CHECKING:
    # It imports Delta's library, which would cost every program time at its start.
    from schemas.tables.delta_files import TableRows

LEDGER_ARROW: Final = columns_of(LedgerRow)
# The columns that `record_of_row` reads. All columns before `seq` name the record and its sender.
RECORD_COLUMNS: Final = (
    *COLUMNS[: COLUMNS.index("seq")],
    *("logged_at", "value", "value_sealed", "wire", "mac_key", "mac"),
)
_ROWS_AT_ONCE: Final = 1000


def ledger_batch(rows: Sequence[LedgerRow]) -> pa.RecordBatch:
    """Convert ledger rows to one Arrow record batch with the columns of the ledger (`LEDGER_ARROW`).

    An empty sequence gives an empty batch. A `sent_at` that is not a time becomes null.
    """
    if not rows:
        return pa.RecordBatch.from_pylist([], schema=LEDGER_ARROW)
    columns = zip(*rows, strict=True)
    arrays = [
        _moments(column) if field.name == "sent_at" else pa.array(column, field.type)
        for column, field in zip(columns, LEDGER_ARROW, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=LEDGER_ARROW)


def _moments(texts: Sequence[str | None]) -> pa.Array:
    """Return ISO 8601 texts as times, null for a text that is not one."""
    try:
        return pa.array(texts, pa.string()).cast(MOMENT)
    except pa.ArrowInvalid:
        return pa.array([_moment(text) for text in texts], MOMENT)


def _moment(text: str | None) -> datetime | None:
    if text is None or not is_utc_timestamp(text):
        return None
    return datetime.fromisoformat(text[:-1][:26]).replace(tzinfo=UTC)


def rows_between(
    dataset: TableRows, partition: int, first: int, end: int, columns: Collection[str] = COLUMNS
) -> Iterator[LedgerRow]:
    """Read the ledger rows of one Kafka partition and yield them in the order of offsets.

    All rows of the range are in memory at once, so choose a small range. Offsets without a row are skipped.

    Args:
        dataset: the rows of the ledger, or of some of its files, by `dataset_of` or `dataset_of_files`.
        partition: the Kafka partition.
        first: the first offset of the range.
        end: the offset after the last one of the range.
        columns: the names of the columns to read. The other fields of each row are None, and so are those whose
            columns an earlier program's ledger lacks.
    """
    there = frozenset(dataset.schema.names)
    names = [name for name in COLUMNS if name in columns and name in there]
    at = (pc.field("partition") == partition) & (pc.field("offset") >= first) & (pc.field("offset") < end)
    rows = dataset.to_table(columns=names, filter=at).sort_by("offset")
    rows = rows.set_column(names.index("logged_at"), "logged_at", rows["logged_at"].cast(pa.int64()))
    for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
        cells = (batch.column(name).to_pylist() if name in names else repeat(None) for name in COLUMNS)
        # Not strict: `repeat` is endless, and the columns that are read end the rows.
        yield from map(LedgerRow._make, zip(*cells, strict=False))
