"""The rows and entries of the live view: live ones from memory, others from its local store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, cast

from connectors.hub.live.live_state import LiveState
from schemas.fold.entries import Entries
from schemas.fold.view_rows import Row
from schemas.state_store.ended_lists import WHOLE, Span

R = TypeVar("R", bound=Row)


class LiveRows:
    """The methods of a LiveView that read. Thread-safe.

    Each may raise StoreDamaged, a TrunklineError. The view then stops, and the next start makes a new store.
    """

    _state: LiveState

    def get(self, row_type: type[R], key: str) -> R | None:
        """Return the row of type `row_type` with this key, such as a job id; None without such a row."""
        return cast("R | None", self.row(row_type.VIEW, key))

    def live(self, row_type: type[R]) -> list[R]:
        """Return the live rows of type `row_type`, in no order. They are in memory (`Row.is_live`)."""
        return cast("list[R]", self._state.live(row_type.VIEW))

    def all(self, row_type: type[R]) -> list[R]:
        """Return all rows of type `row_type`, in no order. This is slow: it reads all ended rows."""
        return cast("list[R]", self.rows(row_type.VIEW))

    def newest_ended(self, row_type: type[R], listed: str, span: Span = WHOLE) -> Iterator[R]:
        """Yield the ended rows of type `row_type` in a list, the newest first. Reads as many as are taken.

        Args:
            row_type: The type of the rows.
            listed: The name of the list, such as a status (`Row.lists`).
            span: The part of the list, by the moment in the column `Row.ORDER`.
        """
        return cast("Iterator[R]", self._state.newest_ended(row_type.VIEW, listed, span))

    def oldest_ended(self, row_type: type[R], listed: str) -> R | None:
        """Return the ended row in a list that `newest_ended` yields last, None without one."""
        return cast("R | None", self._state.oldest_ended(row_type.VIEW, listed))

    def count_ended(self, row_type: type[Row], listed: str, span: Span = WHOLE) -> int:
        """Return the number of ended rows of type `row_type` in a part of a list.

        The numbers of a whole list and of blocks of time are stored, so this takes some milliseconds at most.
        """
        return self._state.count_ended(row_type.VIEW, listed, span)

    def row(self, view: str, key: str) -> Row | None:
        """Return the row with this key in the view named `view`, or None. Raises KeyError without that view."""
        found = self._state.find(view, key)
        return None if found is None else found[1]

    def rows(self, view: str) -> list[Row]:
        """Return all rows of the view named `view`, in no order. Raises KeyError for an unknown view."""
        return list(self._state.rows(view))

    def row_offset(self, view: str, key: str) -> int | None:
        """Return the offset of the record that last changed the row; None for a key that never had a row."""
        found = self._state.find(view, key)
        return None if found is None else found[0]

    def entries(self, stream: str) -> Entries:
        """Return the state of `stream`, such as `job/0a1b2c3d`; it is empty for an unknown stream.

        An entry is read when it is asked for, as it is then. A change of the returned object changes no other.
        """
        return self._state.entries(stream)
