"""The base class of the rows of all views. Each kind of stream declares row classes, and its fold makes rows.

A `Moment` is Kafka's append time in microseconds since 1970 UTC.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

Moment = Annotated[int, msgspec.Meta(description="microseconds since 1970 UTC")]


class Row(msgspec.Struct, frozen=True, gc=False):
    """A row of a view. `VIEW` names the view; `KEY` are the columns whose values identify the row.

    `ORDER` is the column with the moment by which rows are listed, 0 if it is null. It is empty for a view
    whose rows are in no lists.
    """

    VIEW: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]
    ORDER: ClassVar[str] = ""
    _key_values: ClassVar[Any]

    @property
    def key(self) -> str:
        """The values of the columns in `KEY`, joined by slashes. They identify the row within its view."""
        found: str | tuple[str, ...] = self._key_values(self)
        return found if isinstance(found, str) else "/".join(found)

    def __init_subclass__(cls) -> None:
        if "KEY" in cls.__dict__:
            cls._key_values = attrgetter(*cls.KEY)

    @property
    def is_live(self) -> bool:
        """True if the gateway keeps the row in memory. It reads any other row from its local store."""
        return True

    @property
    def lists(self) -> tuple[str, ...]:
        """The names of the lists that contain the row, such as its status. An ended row stays in its lists."""
        return ()


RowT = TypeVar("RowT", bound=Row)


def row_maker(row_type: type[RowT], source: type[msgspec.Struct]) -> Callable[..., RowT]:
    """Return a function that builds a row of `row_type` from an instance of `source`.

    `source` is a class of stream state, such as the entry of a job. The returned function copies the fields
    that both classes have. It takes the other fields of the row as keyword arguments. Call `row_maker` once per
    pair of classes, at import.
    """
    shared = [name for name in row_type.__struct_fields__ if name in source.__struct_fields__]
    values_of = attrgetter(*shared)

    def make(state: msgspec.Struct, **others: object) -> RowT:
        return row_type(**dict(zip(shared, values_of(state), strict=True)), **others)

    return make
