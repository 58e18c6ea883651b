"""The ledger's columns as Arrow types, and the conversion of rows to a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa

from schemas.tables.ledger import LedgerRow
from schemas.wire.field_checks import is_utc_timestamp

_MOMENT: Final = pa.timestamp("us", tz="UTC")

LEDGER_ARROW: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("stream_kind", pa.string(), nullable=False),
        pa.field("stream_id", pa.string(), nullable=False),
        pa.field("door", pa.string()),
        pa.field("principal", pa.string()),
        pa.field("ce_id", pa.string()),
        pa.field("type", pa.string()),
        pa.field("seq", pa.int64()),
        pa.field("sent_at", _MOMENT),
        pa.field("logged_at", _MOMENT, nullable=False),
        pa.field("verdict", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("why", pa.string()),
        pa.field("late", pa.bool_(), nullable=False),
        pa.field("masked", pa.string()),
        pa.field("status_after", pa.string()),
        pa.field("fold_version", pa.int32(), nullable=False),
        pa.field("value", pa.binary()),
        pa.field("value_sealed", pa.string()),
        pa.field("changes", pa.string()),
        pa.field("entries", pa.map_(pa.string(), pa.binary())),
        pa.field("accepted_offset", pa.int64()),
        pa.field("wire", pa.string()),
    ]
)


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
        return pa.array(texts, pa.string()).cast(_MOMENT)
    except pa.ArrowInvalid:
        return pa.array([_moment(text) for text in texts], _MOMENT)


def _moment(text: str | None) -> datetime | None:
    if text is None or not is_utc_timestamp(text):
        return None
    return datetime.fromisoformat(text[:-1][:26]).replace(tzinfo=UTC)
