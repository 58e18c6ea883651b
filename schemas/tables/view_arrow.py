"""The columns of the view tables as Arrow types: those of the rows, and the position in the log."""

from __future__ import annotations

from typing import Final, get_args, get_type_hints

import pyarrow as pa

from schemas.fold.view_rows import Moment, Row
from schemas.streams.kinds import STREAM_ENTRIES, VIEWS

_MOMENT: Final = pa.timestamp("us", tz="UTC")
_TYPES: Final = {
    str: pa.string(),
    int: pa.int64(),
    bool: pa.bool_(),
    Moment: _MOMENT,
    list[str]: pa.list_(pa.string()),
}
# The partition of the stream, and the offset of the record that made the row what it is.
_POSITION: Final = [
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("last_offset", pa.int64(), nullable=False),
]


def _field(name: str, hint: object) -> pa.Field:
    options = [option for option in get_args(hint) if option is not type(None)]
    optional = type(None) in get_args(hint)
    wanted = options[0] if optional else hint
    return pa.field(name, _TYPES[wanted], nullable=optional)  # type: ignore[index]


def _columns(row_type: type[Row]) -> pa.Schema:
    hints = get_type_hints(row_type, include_extras=True)
    return pa.schema([*(_field(name, hints[name]) for name in row_type.__struct_fields__), *_POSITION])


STREAM_ENTRIES_ARROW: Final = pa.schema(
    [
        pa.field("stream_kind", pa.string(), nullable=False),
        pa.field("stream_id", pa.string(), nullable=False),
        pa.field("entry", pa.string(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("fold_version", pa.int32(), nullable=False),
        *_POSITION,
    ]
)

VIEW_ARROW: Final[dict[str, pa.Schema]] = {
    **{name: _columns(view) for name, view in VIEWS.items()},
    STREAM_ENTRIES: STREAM_ENTRIES_ARROW,
}
