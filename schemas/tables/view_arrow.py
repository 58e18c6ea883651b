"""The columns of the view tables: the columns of each view's rows, and the position in the log."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pyarrow as pa

from schemas.streams.kinds import STREAM_ENTRIES, VIEWS
from schemas.tables.ledger import Int32
from schemas.tables.row_columns import columns_of


class StreamEntryRow(NamedTuple):
    """One entry of the state of one stream."""

    stream_kind: str
    """Kind of the stream."""
    stream_id: str
    """Name of the stream within its kind."""
    entry: str
    """Name of the entry within the state of the stream."""
    value: bytes
    """Content of the entry, as the fold encodes it."""
    fold_version: Int32
    """Version of the fold that wrote the entry."""


class Position(NamedTuple):
    """The position in the log of the record that made a row of a view."""

    partition: Int32
    """Kafka partition of the record."""
    last_offset: int
    """Kafka offset of the record."""


VIEW_ROWS: Final[dict[str, type[Any]]] = {**VIEWS, STREAM_ENTRIES: StreamEntryRow}
VIEW_ARROW: Final[dict[str, pa.Schema]] = {name: columns_of(row, Position) for name, row in VIEW_ROWS.items()}
