"""The columns of a table, derived from its row class: types from the hints, comments from the docstrings."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

import pyarrow as pa

from schemas.fold.view_rows import Moment
from schemas.tables.ledger import Int32, TextMoment

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


def columns_of(*row_types: type[Any]) -> pa.Schema:
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

    `row_types` are the row classes from which `columns_of` made the schema. A column without a docstring is
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
