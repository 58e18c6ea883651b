"""Indexes over rows of the live view, and rows by list, in the order of their age, with counts.

The lists are those of jobs, sessions, tasks and so on that the gateway shows and counts, without scans of all
rows.
"""

from __future__ import annotations

import heapq
import sys
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from schemas.fold.settled import AppliedChange
from schemas.fold.stream_kind import STOPPED
from schemas.fold.view_rows import Row, RowT
from schemas.state_store.ended_lists import WHOLE, Span
from schemas.streams.agents.agent_registry import (
    PRESENT,
    AgentKeyRow,
    ParticipantRow,
    list_of_agent,
    list_of_key,
)
from schemas.streams.container.containers import OPEN, RECYCLED, ContainerRow
from schemas.streams.job.job_registry import JOB_STATES, JobRow
from schemas.streams.principal.principals import ACTIVE, REVOKED
from schemas.streams.session.sessions import SessionRow
from schemas.streams.task.task_registry import TASK_STATES, TaskRow, TokenRow
from schemas.streams.thread.threads import ThreadRow

_BLOCK: Final = 1024


class SortedKeys:
    """A sorted set of byte strings. Not thread-safe.

    The keys are in blocks of up to 1,024, so that a change moves few of them. With a million keys, adding,
    removing and finding one takes some microseconds, and counting a range some tens.
    """

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = [[]]
        # The first key of each block. The first block counts as beginning before all keys.
        self._firsts: list[bytes] = [b""]

    def add(self, key: bytes) -> None:
        """Add a key. One that is in the set already is ignored."""
        number, place = self._place(key)
        block = self._blocks[number]
        if place < len(block) and block[place] == key:
            return
        block.insert(place, key)
        if len(block) > _BLOCK:
            tail = block[_BLOCK // 2 :]
            del block[_BLOCK // 2 :]
            self._blocks.insert(number + 1, tail)
            self._firsts.insert(number + 1, tail[0])

    def remove(self, key: bytes) -> None:
        """Remove a key. One that is not in the set is ignored."""
        number, place = self._place(key)
        block = self._blocks[number]
        if place == len(block) or block[place] != key:
            return
        del block[place]
        if not block and number:
            del self._blocks[number], self._firsts[number]

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def count(self, low: bytes, high: bytes) -> int:
        """Return the number of keys from `low` up to but not including `high`, 0 if `high` is lower."""
        if high <= low:
            return 0
        (first, begin), (last, end) = self._place(low), self._place(high)
        return sum(map(len, self._blocks[first:last])) - begin + end

    def highest(self, low: bytes, high: bytes, most: int) -> list[bytes]:
        """Return up to `most` keys from `low` up to but not including `high`: the highest, highest first."""
        (first, begin), (last, end) = self._place(low), self._place(high)
        found: list[bytes] = []
        for number in range(last, first - 1, -1):
            block = self._blocks[number]
            part = block[begin if number == first else 0 : end if number == last else len(block)]
            found += part[::-1]
            if len(found) >= most:
                break
        return found[:most]

    def lowest(self, low: bytes, high: bytes, most: int) -> list[bytes]:
        """Return up to `most` keys from `low` up to but not including `high`: the lowest, lowest first."""
        (first, begin), (last, end) = self._place(low), self._place(high)
        found: list[bytes] = []
        for number in range(first, last + 1):
            block = self._blocks[number]
            found += block[begin if number == first else 0 : end if number == last else len(block)]
            if len(found) >= most:
                break
        return found[:most]

    def _place(self, key: bytes) -> tuple[int, int]:
        """Return the block and the place in it of the first key that is not lower than `key`."""
        number = bisect_right(self._firsts, key) - 1
        return number, bisect_left(self._blocks[number], key)


class RowIndex(ABC, Generic[RowT]):
    """The base class of an index of the live view's rows of some types.

    Register `changed` with the live view before it opens, and call `load` once it is open. Thread-safe for one
    thread that calls `changed` and any number of readers. A subclass must hold `_lock` when it reads.

    Attributes:
        follows: The types of the rows.
    """

    def __init__(self, *row_types: type[RowT]) -> None:
        self.follows = row_types
        self._lock = threading.Lock()
        # Until `load` has ended: the rows that `changed` brought, because `load` may bring older ones.
        self._changed: set[tuple[str, str]] | None = set()

    def load(self, rows: Iterable[RowT]) -> None:
        """Add the rows that the live view contains when it is open. Call it once, after `LiveView.open`.

        A row that `changed` has already added is newer, so it is kept.
        """
        for row in rows:
            with self._lock:
                if self._changed is None or (row.VIEW, row.key) not in self._changed:
                    self._add(row)
        with self._lock:
            self._changed = None

    def changed(self, change: AppliedChange) -> None:
        """Update the index with the changed row that `change` carries. Rows of other types are ignored.

        The live view's thread calls this method for each changed row, also while the view opens.
        """
        if not isinstance(change.row, self.follows):
            return
        with self._lock:
            if self._changed is not None:
                self._changed.add((change.view, change.key))
            self._add(change.row)

    @abstractmethod
    def _add(self, row: RowT) -> None:
        """Add a row, or replace the earlier one with its key. The caller holds `_lock`."""


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
        self._row_type = row_type
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


CONTAINER_LISTS: Final = (OPEN, RECYCLED)
TOKEN_LISTS: Final = (ACTIVE, REVOKED)


class RowLists:
    """The lists of the rows of `view`, kept up to date by the live view.

    Register `changed` before the view opens, and call `load` once it is open. The rows are newest first.

    Attributes:
        jobs: By registration. The lists are those of `job_lists`.
        sessions: By creation. A list is named by a state.
        tasks: By submission. The lists are those of `task_lists`.
        tokens: By issue. The lists are `TOKEN_LISTS`. An expired token is in the list of active ones.
        containers: By creation. The lists are `CONTAINER_LISTS`.
        threads: By opening. The lists are `ALL` and the root threads' ids.
        participants: By their stop. The lists are `PRESENT` and `STOPPED`.
        keys: The active keys of participants, by registration. There are lists of agents and of key ids.
    """

    def __init__(self, view: Rows) -> None:
        self._view = view
        self.jobs = OrderedRows(JobRow, view)
        self.sessions = OrderedRows(SessionRow, view)
        self.tasks = OrderedRows(TaskRow, view)
        self.tokens = OrderedRows(TokenRow, view)
        self.containers = OrderedRows(ContainerRow, view)
        self.threads = OrderedRows(ThreadRow, view)
        self.participants = OrderedRows(ParticipantRow, view)
        self.keys = OrderedRows(AgentKeyRow, view)
        of_all = (self.jobs, self.sessions, self.tasks, self.tokens, self.containers, self.threads)
        self._by_type: dict[type[Row], OrderedRows[Any]] = {
            one.follows[0]: one for one in (*of_all, self.participants, self.keys)
        }
        self.follows = tuple(self._by_type)

    def load(self) -> None:
        """Add the live rows when the live view is open. Call it once, after `LiveView.open`."""
        for row_type, index in self._by_type.items():
            index.load(self._view.live(row_type))

    def changed(self, change: AppliedChange) -> None:
        """Update the list of a changed row. The live view's thread calls it. Other rows are ignored."""
        index = self._by_type.get(type(change.row))  # type: ignore[arg-type]
        if index is not None:
            index.changed(change)

    def jobs_by_state(self) -> dict[str, int]:
        """Return the number of jobs in each state. A state without jobs is not a key of the result."""
        counts = {state: self.jobs.count([state]) for state in JOB_STATES}
        return {state: count for state, count in counts.items() if count}

    def participants_with(self, status: str | None, capability: str | None = None) -> list[ParticipantRow]:
        """Return the participants in a state that have a capability, sorted by name.

        Without `status` they are those that have not stopped, and without `capability` those with any. Only the
        stopped ones are read from the store.
        """
        are_stopped = status == STOPPED
        rows = self.participants.newest([STOPPED]) if are_stopped else self.participants.live(PRESENT)
        fit = (row for row in rows if status in (None, row.status))
        found = [row for row in fit if capability is None or capability in row.capabilities]
        return sorted(found, key=lambda row: row.agent_name)

    def keys_of(self, agent_name: str) -> list[AgentKeyRow]:
        """Return the active keys of a participant, in the order of their registration."""
        return self.keys.live(list_of_agent(agent_name))[::-1]

    def keys_with(self, key_id: str) -> list[AgentKeyRow]:
        """Return the active keys of all participants that have this id."""
        return self.keys.live(list_of_key(key_id))


def job_lists(state: str | None, session: str | None) -> list[str]:
    """Return the lists of the jobs in a state, or in any, that a session runs, ran or waits for, or any."""
    return [_with(one, session)[-1] for one in (JOB_STATES if state is None else (state,))]


def task_lists(status: str | None, agent_name: str | None) -> list[str]:
    """Return the lists of the tasks in a state, or in any, of an agent, or of any."""
    return [_with(one, agent_name)[-1] for one in (TASK_STATES if status is None else (status,))]


def _with(state: str, name: str | None) -> tuple[str, ...]:
    return (state,) if name is None else (state, f"{state}/{name}")
