"""The ledger's columns as Arrow types, and the conversion of rows to a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa

from schemas.tables.ledger import LedgerRow
from schemas.tables.row_columns import MOMENT, columns_of
from schemas.wire.field_checks import is_utc_timestamp

LEDGER_ARROW: Final = columns_of(LedgerRow)


def ledger_batch(rows: Sequence[LedgerRow]) -> pa.RecordBatch:
    """Return `rows` as one Arrow batch of `LEDGER_ARROW`. An empty sequence gives an empty batch."""
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
