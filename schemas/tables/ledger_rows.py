"""Reads rows of the ledger in the order of the log, without Spark, to turn them into records again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables.ledger import COLUMNS, LedgerRow

if TYPE_CHECKING:
    # It imports pandas, which would add a quarter of a second to the start of every program.
    import pyarrow.dataset as ds

# The columns that `record_of_row` reads. All columns before `seq` name the record and its sender.
RECORD_COLUMNS: Final = (*COLUMNS[: COLUMNS.index("seq")], "logged_at", "value", "value_sealed", "wire")
_ROWS_AT_ONCE: Final = 1000


def rows_between(
    dataset: ds.Dataset, partition: int, first: int, end: int, columns: Collection[str] = COLUMNS
) -> Iterator[LedgerRow]:
    """Yield the rows of `partition` from offset `first` to before `end`, in the order of offsets.

    `columns` are the columns to read; the other fields of a row are None. All rows of the range are in memory
    at once.
    """
    names = [name for name in COLUMNS if name in columns]
    at = (pc.field("partition") == partition) & (pc.field("offset") >= first) & (pc.field("offset") < end)
    rows = dataset.to_table(columns=names, filter=at).sort_by("offset")
    rows = rows.set_column(names.index("logged_at"), "logged_at", rows["logged_at"].cast(pa.int64()))
    for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
        cells = (batch.column(name).to_pylist() if name in names else repeat(None) for name in COLUMNS)
        # Not strict: `repeat` is endless, and the columns that are read end the rows.
        yield from map(LedgerRow._make, zip(*cells, strict=False))
