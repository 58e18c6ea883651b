"""The rows of one type by list, such as the running jobs, in the order of their age, with counts."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, TypeVar

from connectors.hub.lists.row_index import RowIndex
from connectors.hub.live.sorted_keys import SortedKeys
from schemas.fold.view_rows import Row, RowT
from schemas.state_store.ended_lists import WHOLE, Span

R = TypeVar("R", bound=Row)
_MOMENT_MOST: Final = 2**63 - 1


class Rows(Protocol):
    """The rows of all views, such as a `LiveView`, which describes these methods."""

    def get(self, row_type: type[R], key: str) -> R | None:
        """Return the row of this type and key, None without one."""

    def live(self, row_type: type[R]) -> list[R]:
        """Return the live rows of this type."""

    def newest_ended(self, row_type: type[R], listed: str, span: Span) -> Iterator[R]:
        """Yield the ended rows in a part of a list, the newest first."""

    def oldest_ended(self, row_type: type[R], listed: str) -> R | None:
        """Return the ended row in a list that `newest_ended` yields last, None without one."""

    def count_ended(self, row_type: type[Row], listed: str, span: Span) -> int:
        """Return the number of ended rows in a part of a list."""


class OrderedRows(RowIndex[RowT]):
    """The rows of one type by list and, within a list, by age and key. Thread-safe.

    A row says in which lists it is (`Row.lists`), and `Row.ORDER` names the column with its age. This index has
    the live rows, at 65 to 150 bytes for each list of a row. The view has the lists of the ended ones.

    Args:
        row_type: The type of the rows.
        view: The rows of all types.
    """

    def __init__(self, row_type: type[RowT], view: Rows) -> None:
        super().__init__(row_type)
        self._view = view
        # The list's name, NUL, age in 8 bytes, key of the row.
        self._places = SortedKeys()
        self._known: dict[str, tuple[int, tuple[str, ...]]] = {}

    def newest(
        self,
        lists: Sequence[str],
        most: int = sys.maxsize,
        *,
        since: int = 0,
        before: tuple[int, str] | None = None,
    ) -> list[RowT]:
        """Return up to `most` rows of these lists, newest first, and those of equal age by key, highest first.

        The rows are the present ones of the view. A row that has left the lists is left out.

        Args:
            lists: The names of the lists, none of which have a row in common.
            most: The largest number of rows.
            since: Only rows of this age or newer.
            before: Only rows before this age and key.
        """
        span, found = _span(since, before), dict[str, RowT]()
        ended = (self._view.newest_ended(self._row_type, listed, span) for listed in lists)
        # The live rows are read first. One that ends meanwhile may come twice, but is not missed.
        for row in heapq.merge(self._newest_live(lists, most, span), *ended, key=_age_and_key, reverse=True):
            if len(found) == most:
                break
            found.setdefault(row.key, row)
        return list(found.values())

    def live(self, listed: str) -> list[RowT]:
        """Return the live rows of a list as `newest` does, from memory alone."""
        return list(self._newest_live([listed], sys.maxsize, WHOLE))

    def oldest(self, listed: str) -> RowT | None:
        """Return the row of a list that comes last in `newest`, None without one."""
        with self._lock:
            places = self._places.lowest(*_range(listed, _span(0, None)), 1)
        key = places[0][len(listed.encode()) + 9 :].decode() if places else None
        live = None if key is None else self._view.get(self._row_type, key)
        found = [row for row in (live, self._view.oldest_ended(self._row_type, listed)) if row is not None]
        return min(found, key=_age_and_key, default=None)

    def count(self, lists: Sequence[str], *, since: int = 0, before: tuple[int, str] | None = None) -> int:
        """Return the number of rows that `newest` returns without a limit, by the indexes alone."""
        span = _span(since, before)
        with self._lock:
            live = sum(self._places.count(*_range(listed, span)) for listed in lists)
        return live + sum(self._view.count_ended(self._row_type, listed, span) for listed in lists)

    def _newest_live(self, lists: Sequence[str], most: int, span: Span) -> Iterator[RowT]:
        wanted = frozenset(lists)
        while True:
            places = self._newest_places(lists, most, span)
            for place in places:
                row = self._view.get(self._row_type, place[8:].decode())
                if row is not None and not wanted.isdisjoint(row.lists):
                    yield row
            if not places or len(places) < most:
                return
            last = places[-1]
            span = Span(span.since, (int.from_bytes(last[:8], "big"), last[8:].decode()))

    def _newest_places(self, lists: Sequence[str], most: int, span: Span) -> list[bytes]:
        """Return ages and keys of the newest live rows."""
        found: list[bytes] = []
        with self._lock:
            for listed in lists:
                begin = len(listed.encode()) + 1
                found += [place[begin:] for place in self._places.highest(*_range(listed, span), most)]
        return found if len(lists) == 1 else heapq.nlargest(most, found)

    def _add(self, row: RowT) -> None:
        key, now = row.key, (_age(row), row.lists if row.is_live else ())
        known = self._known.get(key)
        if known != now:
            for place in _places_of(key, *known) if known is not None else ():
                self._places.remove(place)
            for place in _places_of(key, *now):
                self._places.add(place)
        if row.is_live:
            self._known[key] = now
        else:
            self._known.pop(key, None)


def _age(row: Row) -> int:
    return getattr(row, row.ORDER) or 0


def _age_and_key(row: Row) -> tuple[int, str]:
    return _age(row), row.key


def _span(since: int, before: tuple[int, str] | None) -> Span:
    return Span(_bounded(since), None if before is None else (_bounded(before[0]), before[1]))


def _bounded(age: int) -> int:
    return min(max(0, age), _MOMENT_MOST)


def _place(age: int, key: str) -> bytes:
    return age.to_bytes(8, "big") + key.encode()


def _places_of(key: str, age: int, lists: tuple[str, ...]) -> list[bytes]:
    place = _place(age, key)
    return [listed.encode() + b"\0" + place for listed in lists]


def _range(listed: str, span: Span) -> tuple[bytes, bytes]:
    """Return the lowest place of a list in a span, and that where the list or the span ends."""
    name = listed.encode()
    end = b"\1" if span.before is None else b"\0" + _place(*span.before)
    return name + b"\0" + _place(span.since, ""), name + end
