"""An index of the live view's rows of one type: groups of rows, such as the running jobs, in order of age."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from typing import Final

from connectors.gateway.services.row_index import RowIndex
from connectors.gateway.services.sorted_keys import SortedKeys
from schemas.fold.view_rows import RowT

_MOMENT_MOST: Final = 2**63 - 1


class OrderedRows(RowIndex[RowT]):
    """An index of rows by group and, within a group, by time and key. Thread-safe.

    A row is in several groups, such as those of its state and of its state and session together. With the index
    a list or a count need not look at all rows. A group is a text without NUL characters.

    A final row takes no memory but that of its places, 65 to 150 bytes for each group. It must stay in its
    groups, at its age.

    Args:
        row_type: The type of the rows.
        row_of: Returns the present row with this key from the live view.
        age: Returns the time of a row, in a unit of the caller's choice.
        groups: Returns the groups of a row.
        is_final: Returns whether the groups and the age of a row stay as they are.
    """

    def __init__(
        self,
        row_type: type[RowT],
        row_of: Callable[[type[RowT], str], RowT | None],
        age: Callable[[RowT], int],
        groups: Callable[[RowT], tuple[str, ...]],
        is_final: Callable[[RowT], bool],
    ) -> None:
        super().__init__(row_type)
        self._row_of = row_of
        self._age = age
        self._groups = groups
        self._is_final = is_final
        # Group, NUL, age in 8 bytes, key of the row.
        self._places = SortedKeys()
        self._known: dict[str, tuple[int, tuple[str, ...]]] = {}

    def newest(
        self,
        groups: Sequence[str],
        most: int = sys.maxsize,
        *,
        since: int = 0,
        before: tuple[int, str] | None = None,
    ) -> list[RowT]:
        """Return up to `most` rows of these groups, newest first, and those of equal age by key, highest first.

        The rows are the present ones of the live view. A row that has left the groups is left out.

        Args:
            groups: The groups, none of which have a row in common.
            most: The largest number of rows.
            since: Only rows of this age or newer.
            before: Only rows before this age and key.
        """
        wanted, rows = frozenset(groups), list[RowT]()
        end = None if before is None else _place(*before)
        while True:
            left = most - len(rows)
            places = self._newest_places(groups, left, since, end)
            for place in places:
                row = self._row_of(self._row_type, place[8:].decode())
                if row is not None and not wanted.isdisjoint(self._groups(row)):
                    rows.append(row)
            if len(places) < left or len(rows) == most:
                return rows
            end = places[-1]

    def oldest(self, group: str) -> RowT | None:
        """Return the row of a group that comes last in `newest`, None without one."""
        with self._lock:
            places = self._places.lowest(*_span(group, 0, None), 1)
        return self._row_of(self._row_type, places[0][len(group.encode()) + 9 :].decode()) if places else None

    def count(self, groups: Sequence[str], *, since: int = 0, before: tuple[int, str] | None = None) -> int:
        """Return the number of rows that `newest` returns without a limit, by the index alone."""
        end = None if before is None else _place(*before)
        with self._lock:
            return sum(self._places.count(*_span(group, since, end)) for group in groups)

    def _newest_places(self, groups: Sequence[str], most: int, since: int, end: bytes | None) -> list[bytes]:
        """Return ages and keys of the newest rows."""
        found: list[bytes] = []
        with self._lock:
            for group in groups:
                begin = len(group.encode()) + 1
                span = _span(group, since, end)
                found += [place[begin:] for place in self._places.highest(*span, most)]
        return found if len(groups) == 1 else heapq.nlargest(most, found)

    def _add(self, row: RowT) -> None:
        key, now = row.key, (self._age(row), self._groups(row))
        known = self._known.get(key)
        if known != now:
            for place in _places_of(key, *known) if known is not None else ():
                self._places.remove(place)
            for place in _places_of(key, *now):
                self._places.add(place)
        if self._is_final(row):
            self._known.pop(key, None)
        else:
            self._known[key] = now


def _place(age: int, key: str) -> bytes:
    return min(max(0, age), _MOMENT_MOST).to_bytes(8, "big") + key.encode()


def _places_of(key: str, age: int, groups: tuple[str, ...]) -> list[bytes]:
    place = _place(age, key)
    return [group.encode() + b"\0" + place for group in groups]


def _span(group: str, since: int, end: bytes | None) -> tuple[bytes, bytes]:
    """Return the lowest place of a group since an age, and that where the group or the wanted part ends."""
    name = group.encode()
    return name + b"\0" + _place(since, ""), name + (b"\1" if end is None else b"\0" + end)
