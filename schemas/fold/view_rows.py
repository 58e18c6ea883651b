"""The base class of the rows of all views. Each kind of stream declares its rows, and its fold makes them.

A `Moment` is Kafka's append time in microseconds since 1970 UTC.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

Moment = Annotated[int, msgspec.Meta(description="microseconds since 1970 UTC")]


class Row(msgspec.Struct, frozen=True, gc=False):
    """A row of a view. `VIEW` names the view; `KEY` are the columns whose values identify the row."""

    VIEW: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]

    @property
    def key(self) -> str:
        """The values of the key columns, joined by a slash."""
        return "/".join(getattr(self, column) for column in self.KEY)
