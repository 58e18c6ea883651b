"""The changes that a live view's store does not have yet, and a cache of what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from schemas.fold.entries import EntriesInMemory, Writes
from schemas.state_store.gateway_store import PlacedRow, RowChange
from schemas.state_store.partition_store import EntryChange
from schemas.streams.fold import VIEWS
from schemas.wire.record import Record

T = TypeVar("T")

VALUES_CACHED: Final = 10_000
CACHED_BYTES: Final = 32 * 1024 * 1024
OVERHEAD_BYTES: Final = 700
"""The memory of a row or an entry beside its texts, as an estimate."""


class Unflushed:
    """The changes of some records that follow each other in the log, which the store does not have yet.

    Attributes:
        entries: The changed entries by stream.
        rows: The changed rows by the name of the view and the row's key.
        last: The last record by partition.
        records: The number of records.
        size: The memory for the changes in bytes, by estimate.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Writes] = {}
        # By stream, of those whose keys were asked for: the changed entries that were not deleted.
        self._present: dict[str, EntriesInMemory] = {}
        self.rows: dict[str, dict[str, PlacedRow]] = {name: {} for name in VIEWS}
        self.last: dict[int, Record] = {}
        self.records = 0
        self.size = 0

    def write(self, stream: str, writes: Writes) -> None:
        """Add the changes of a record to the entries of its stream."""
        self.entries.setdefault(stream, {}).update(writes)
        if (present := self._present.get(stream)) is not None:
            for key, value in writes.items():
                present.put(key, value)

    def keys(self, stream: str, prefix: str, after: str, most: int) -> list[str]:
        """Return keys of changed entries that were not deleted, in order (see `EntrySource.keys`)."""
        present = self._present.get(stream)
        if present is None:
            writes = self.entries.get(stream, {})
            present = EntriesInMemory({key: value for key, value in writes.items() if value is not None})
            self._present[stream] = present
        return present.keys(prefix, after, most)

    def entry_changes(self) -> Iterator[EntryChange]:
        """Yield the changed entries."""
        for stream, writes in self.entries.items():
            for entry, value in writes.items():
                yield stream, entry, value

    def row_changes(self) -> Iterator[RowChange]:
        """Yield the changed rows."""
        for view, rows in self.rows.items():
            for key, placed in rows.items():
                yield view, key, placed


class Recent(Generic[T]):
    """The values that were read last, such as ended rows, within limits of number and memory.

    Args:
        size_of: Returns the memory of a value in bytes, by estimate.
    """

    def __init__(self, size_of: Callable[[T], int]) -> None:
        self._size_of = size_of
        self._values: dict[tuple[str, str], T] = {}
        self._size = 0

    def get(self, key: tuple[str, str]) -> T | None:
        """Return a value, or None if it is not here."""
        return self._values.get(key)

    def put(self, key: tuple[str, str], value: T) -> None:
        """Add a value, or replace it. The values that were added first make room for it."""
        self.drop(key)
        self._values[key] = value
        self._size += self._size_of(value)
        while len(self._values) > VALUES_CACHED or self._size > CACHED_BYTES:
            self.drop(next(iter(self._values)))

    def drop(self, key: tuple[str, str]) -> None:
        """Remove a value. An unknown one is ignored."""
        known = self._values.pop(key, None)
        self._size -= 0 if known is None else self._size_of(known)


def row_size(placed: PlacedRow) -> int:
    """Return the memory of a row in bytes, by estimate."""
    texts = () if placed[1] is None else msgspec.structs.astuple(placed[1])
    return OVERHEAD_BYTES + sum(len(one) for one in texts if isinstance(one, str))


def entry_size(value: bytes) -> int:
    """Return the memory of an entry in bytes, by estimate."""
    return OVERHEAD_BYTES + len(value)
