"""The columns of ledger and views as Arrow types, and the conversion of ledger rows to an Arrow batch and back.

The columns are derived from the row classes: types from the hints, comments from the docstrings.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise, repeat
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc

from schemas.fold.view_rows import Moment
from schemas.streams.fold import STREAM_ENTRIES, VIEWS
from schemas.tables.ledger import COLUMNS, Int32, LedgerRow, TextMoment
from trunkline_agent.wire.moments import is_utc_timestamp

if TYPE_CHECKING:
    from schemas.tables.delta_files import TableRows

MOMENT: Final = pa.timestamp("us", tz="UTC")
_TYPES: Final = {
    str: pa.string(),
    int: pa.int64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    Int32: pa.int32(),
    Moment: MOMENT,
    TextMoment: MOMENT,
    list[str]: pa.list_(pa.string()),
    list[tuple[str, bytes | None]]: pa.map_(pa.string(), pa.binary()),
}


def _columns_of(*row_types: type[Any]) -> pa.Schema:
    """Return the Arrow schema of a table whose rows have the fields of all these classes, in their order.

    A field whose type hint allows `None` becomes a nullable column. Raises KeyError for a type hint that has no
    Arrow type in this module.
    """
    hints = {one: get_type_hints(one, include_extras=True) for one in row_types}
    return pa.schema([_field(name, hints[one][name]) for one in row_types for name in one.__match_args__])


def _field(name: str, hint: object) -> pa.Field:
    options = get_args(hint)
    nullable = NoneType in options
    return pa.field(name, _TYPES[options[0] if nullable else hint], nullable=nullable)  # type: ignore[index]


def with_comments(schema: pa.Schema, *row_types: type[Any]) -> pa.Schema:
    """Return a copy of `schema` whose columns have comments: the docstrings below the fields of `row_types`.

    `row_types` are the row classes from which `_columns_of` made the schema. A column without a docstring is
    left unchanged. Use the result to create a Delta table: a later write with such a schema adds no comments to
    an existing table.
    """
    comments = {name: text for one in row_types for name, text in column_texts(one).items()}
    return pa.schema(
        [
            field.with_metadata({"comment": comments[field.name]}) if field.name in comments else field
            for field in schema
        ]
    )


def column_texts(row_type: type[Any]) -> dict[str, str]:
    """Return the docstring of each field of a row class as one line, by the field's name.

    A field without a docstring is left out, as are the fields of base classes. The function reads the source of
    the class, so call it once per class.
    """
    (tree,) = ast.parse(inspect.getsource(row_type)).body
    found = {}
    for field, below in pairwise(ast.iter_child_nodes(tree)):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


LEDGER_ARROW: Final = _columns_of(LedgerRow)
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
VIEW_ARROW: Final[dict[str, pa.Schema]] = {name: _columns_of(row, Position) for name, row in VIEW_ROWS.items()}
