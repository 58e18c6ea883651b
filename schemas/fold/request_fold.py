"""The skeleton of the folds whose records are requests: one entry, which each accepted request changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.memories import RequestChunk, RequestMemory
from schemas.fold.settled import Change, Outcome, accepted, changed, rejected
from schemas.fold.stream_kind import FoldInput, Transitions, wrong_state
from trunkline_agent.wire.verdicts import UNKNOWN_STREAM

E = TypeVar("E", bound=msgspec.Struct)


class Requests:
    """The place of a memory of requests: the entry `key`, and `key/...` with older requests.

    With `is_inside`, the memory is the attribute `requests` of the stream's own entry instead.
    """

    def __init__(self, key: str = "requests", *, is_inside: bool = False) -> None:
        self.older: Final = StructEntries(f"{key}/", RequestChunk)
        self._apart: Final = None if is_inside else StructEntries(key, RequestMemory)

    def read(self, given: FoldInput, entry: Any) -> RequestMemory:
        """Return the memory. `entry` is the stream's own one, or `None` before the first record."""
        if self._apart is not None:
            return self._apart.read(given.entries) or RequestMemory()
        return RequestMemory() if entry is None else entry.requests

    def add(self, given: FoldInput, entry: Any) -> None:
        """Remember a request. `entry` is the stream's own one after the record."""
        memory = self.read(given, entry)
        memory.add(given, self.older)
        if self._apart is not None:
            self._apart.write(given.entries, memory)


class RequestFold(Generic[E]):
    """The fold of a stream that has one entry with a status, which requests make and change.

    A request that was accepted before is a duplicate, and its id with other content a conflict. Any other one
    is applied by the function of its type. If that accepts it, it is remembered, and the entry is written.

    Args:
        entry: the place of the entry.
        on: for each record type the function that applies a record. It gets the entry, or `None` before the
            first record. It returns the entry as it is now, or the outcome of a record that changes nothing.
        begins: the record types that may come first.
        unknown: the explanation of the rejection if another type comes first.
        noun: the word for the thing whose status it is, such as `webhook`.
        transitions: each status with those that may follow it.
        leads_to: the status to which a type leads always. It must be one that may follow.
        changes: returns the rows that are written. `None`: the entry is the row.
        requests: the memory of requests. `None`: the entry `requests`.
        apart: the memories of the types that are not remembered there.
    """

    def __init__(
        self,
        entry: StructEntries[E],
        on: Mapping[str, Callable[[FoldInput, Any], E | Outcome]],
        *,
        begins: Collection[str],
        unknown: str,
        noun: str = "",
        transitions: Transitions | None = None,
        leads_to: Mapping[str, str] | None = None,
        changes: Callable[[FoldInput, Any], tuple[Change, ...]] = lambda _, row: (changed(row),),
        requests: Requests | None = None,
        apart: Mapping[str, Requests] | None = None,
    ) -> None:
        self._entry, self._on, self._begins, self._unknown = entry, on, begins, unknown
        self._noun, self._transitions, self._leads_to = noun, transitions or {}, leads_to or {}
        self._changes, self._requests, self._apart = changes, requests or Requests(), apart or {}

    def settle(self, given: FoldInput) -> Outcome:
        """Settle a record: update the stream state, return verdict and changed rows.

        `schemas.streams.fold.settle` calls this method with a checked body. The changes of the stream state,
        `given.entries`, count only if the record is accepted.
        """
        known: Any = self._entry.read(given.entries)
        requests = self._apart.get(given.type, self._requests)
        status = None if known is None else known.status
        repeated = requests.read(given, known).repeated(given, requests.older, status)
        if repeated is not None:
            return repeated
        if known is None and given.type not in self._begins:
            return rejected(UNKNOWN_STREAM, self._unknown)
        wanted = self._leads_to.get(given.type)
        if known is not None and wanted is not None and wanted not in self._transitions[known.status]:
            return wrong_state(self._transitions, known.status, self._noun)
        found: Any = self._on[given.type](given, known)
        if isinstance(found, Outcome):
            return found
        requests.add(given, found)
        self._entry.write(given.entries, found)
        return accepted(found.status, self._changes(given, found))
