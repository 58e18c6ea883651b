"""The entries of a stream: a small key-value store with all that the fold remembers of earlier records."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from typing import Final, Generic, Protocol, TypeVar, cast

import msgspec

from trunkline_agent.errors import TrunklineError

_FIRST_READ: Final = 32
_MOST_READ: Final = 8192


class KeyRange:
    """The keys that begin with `prefix`, as stored and with the changes that are kept.

    A store is read in parts, as far as an iteration gets, and each part once.

    Args:
        read: returns the first stored keys with a prefix and after a key, at most so many, in order.
        prefix: the prefix.
        kept: the kept changes by key; `None` for a deleted entry. The caller adds to it, and calls `note`.
    """

    __slots__ = ("_end", "_is_whole", "_kept", "_keys", "_most", "_prefix", "_read")

    def __init__(
        self, read: Callable[[str, str, int], list[str]], prefix: str, kept: Mapping[str, object]
    ) -> None:
        self._read, self._prefix, self._kept = read, prefix, kept
        # The keys up to and including `_end`, the last stored one that was read.
        self._keys: list[str] = []
        self._end = ""
        self._is_whole = False
        self._most = _FIRST_READ

    def note(self, key: str, *, is_there: bool) -> None:
        """Note that an entry with the prefix was changed or deleted. Not during an iteration."""
        if key > self._end and not self._is_whole:
            return
        at = bisect_left(self._keys, key)
        was_there = at < len(self._keys) and self._keys[at] == key
        if is_there and not was_there:
            insort(self._keys, key)
        elif was_there and not is_there:
            del self._keys[at]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys in order. They are read as far as the iteration gets."""
        at, keys = 0, self._keys
        while True:
            while at < len(keys):
                yield keys[at]
                at += 1
            if self._is_whole:
                return
            self._read_on()

    def _read_on(self) -> None:
        stored = self._read(self._prefix, self._end, self._most)
        self._is_whole = len(stored) < self._most
        begin, self._end = self._end, stored[-1] if stored else self._end
        self._most = min(self._most * 2, _MOST_READ)
        part = {key for key in stored if key not in self._kept}
        for key, value in self._kept.items():
            is_read = begin < key and (self._is_whole or key <= self._end)
            if is_read and value is not None and key.startswith(self._prefix):
                part.add(key)
        self._keys.extend(sorted(part))


T = TypeVar("T", bound=msgspec.Struct)

Writes = dict[str, bytes | None]
"""The changed entries: each key with its new bytes, or with `None` if the entry was deleted."""
_Value = bytes | msgspec.Struct
_encode: Final = msgspec.msgpack.Encoder().encode
_UNKNOWN: Final = object()


class EntriesUnreadable(TrunklineError):
    """The stored entries of a stream cannot be read. The record is not settled, and the runner must stop."""


class EntrySource(Protocol):
    """The stored entries of one stream, as a runner keeps them. `Entries` reads them and never changes them.

    Both methods raise EntriesUnreadable if the store is damaged.
    """

    def get(self, key: str) -> bytes | None:
        """Return the stored bytes of the entry `key`, or `None` if there is no such entry."""
        ...

    def keys(self, prefix: str, after: str, most: int) -> list[str]:
        """Return the first keys that begin with `prefix` and are greater than `after`, in the order of ASCII.

        At most `most` keys are returned. Fewer mean that there are no more.
        """
        ...


class EntriesInMemory:
    """An `EntrySource` in memory, with all entries of a stream. `stored` is copied; `None` means none."""

    __slots__ = ("_sorted", "by_key")

    def __init__(self, stored: Mapping[str, bytes] | None = None) -> None:
        self.by_key: dict[str, bytes] = {} if stored is None else dict(stored)
        # None until `keys` needs it.
        self._sorted: list[str] | None = None

    def get(self, key: str) -> bytes | None:
        """Return the bytes of the entry `key`, or `None` if there is no such entry."""
        return self.by_key.get(key)

    def keys(self, prefix: str, after: str, most: int) -> list[str]:
        """Return keys in order (see `EntrySource.keys`)."""
        if self._sorted is None:
            self._sorted = sorted(self.by_key)
        keys = self._sorted
        start = max(bisect_left(keys, prefix), bisect_right(keys, after))
        found = keys[start : start + most]
        if found and not found[-1].startswith(prefix):
            del found[next(at for at, key in enumerate(found) if not key.startswith(prefix)) :]
        return found

    def put(self, key: str, value: bytes | None) -> None:
        """Set an entry to `value`, or delete it if `value` is `None`."""
        is_there = key in self.by_key
        if value is None:
            self.by_key.pop(key, None)
        else:
            self.by_key[key] = value
        if self._sorted is not None and is_there == (value is None):
            if is_there:
                del self._sorted[bisect_left(self._sorted, key)]
            else:
                insort(self._sorted, key)


class Entries:
    """The entries of one stream, and the pending changes of the record that is being settled.

    While a record is settled, the fold of its kind calls `get`, `struct`, `put`, `delete` and `with_prefix`.
    Then `schemas.streams.fold.settle` calls `keep` for an accepted record and `drop` for any other, so only
    accepted records change a stream. A runner (the gateway or a Spark job) calls `take_writes` to get the
    changes that it must store. Keys are short ASCII text; values are bytes. Not thread-safe.

    A struct that the fold puts is encoded by `take_writes`, and until then `struct` returns the same object. So
    a fold changes a struct only when it accepts the record. If the fold fails in the middle of a change, the
    entries that were changed since `take_writes` are not reliable, and the runner must read them anew.

    Args:
        stored: the stored entries, which are copied. `None` means none.
        source: where the entries are stored, instead of `stored`. It must not change until `take_writes`, and
            must have the changes afterwards if this object is still used.
    """

    __slots__ = ("_decoded", "_kept", "_pending", "_ranges", "_source")

    def __init__(self, stored: Mapping[str, bytes] | None = None, source: EntrySource | None = None) -> None:
        self._source: EntrySource = EntriesInMemory(stored) if source is None else source
        # The changes of accepted records that `take_writes` has not returned.
        self._kept: dict[str, _Value | None] = {}
        self._pending: dict[str, _Value | None] = {}
        # Structs as they are without pending changes, and ranges of keys, by prefix. A gateway has many streams
        # and few in use, so there are no empty dicts.
        self._decoded: dict[str, msgspec.Struct] | None = None
        self._ranges: dict[str, KeyRange] | None = None

    def get(self, key: str) -> bytes | None:
        """Return the bytes of the entry `key`, or `None` if it does not exist. Pending changes are included."""
        found = self._changed(key)
        if found is _UNKNOWN:
            return self._source.get(key)
        return _encode(found) if isinstance(found, msgspec.Struct) else cast(bytes | None, found)

    def struct(self, key: str, decode: Callable[[bytes], T]) -> T | None:
        """Return the entry `key` as a struct, or `None` if it does not exist. Pending changes are included.

        The struct is decoded once until `take_writes`. A fold changes it only when it accepts the record, and
        then passes it to `put`.
        """
        decoded = self._decoded
        if decoded is None:
            decoded = self._decoded = {}
        elif not self._pending and (known := decoded.get(key)) is not None:
            return cast(T, known)
        found = self._changed(key)
        if found is _UNKNOWN:
            known = decoded.get(key)
            if known is not None:
                return cast(T, known)
            found = self._source.get(key)
        if isinstance(found, bytes):
            found = decoded[key] = decode(found)
        return cast("T | None", found)

    def _changed(self, key: str) -> object:
        """Return the changed value of an entry, `None` for a deleted one, or `_UNKNOWN` without a change."""
        if self._pending and key in self._pending:
            return self._pending[key]
        return self._kept.get(key, _UNKNOWN)

    def put(self, key: str, value: bytes | msgspec.Struct) -> None:
        """Set the entry `key` to `value`. The change is pending: `keep` applies it, and `drop` discards it.

        A struct is encoded as msgpack when its bytes are needed, at the latest by `take_writes`.
        """
        # The struct of a kept change is encoded later, with all that the fold has changed in it.
        if self._pending or self._kept.get(key) is not value:
            self._pending[key] = value

    def delete(self, key: str) -> None:
        """Delete the entry `key`, if any. The change is pending: `keep` applies it, and `drop` discards it."""
        self._pending[key] = None

    def with_prefix(self, prefix: str) -> Iterator[str]:
        """Return an iterator over the keys that begin with `prefix`, in sorted order.

        Pending changes made before the call are included; changes made during the iteration are not. Reading
        only the first key is cheap even if there are many.
        """
        ranges = self._ranges
        if ranges is None:
            ranges = self._ranges = {}
        found = ranges.get(prefix)
        if found is None:
            found = ranges[prefix] = KeyRange(self._source.keys, prefix, self._kept)
        pending = dict(self._pending)
        if not pending:
            return iter(found)
        drafts = (key for key, value in pending.items() if value is not None and key.startswith(prefix))
        return merge((key for key in found if key not in pending), sorted(drafts))

    def keep(self) -> None:
        """Apply the pending changes. The next call of `take_writes` returns them, too.

        `schemas.streams.fold.settle` calls this when it has accepted the record that made the changes.
        """
        pending = self._pending
        if not pending:
            return
        if self._ranges:
            for key, value in pending.items():
                for prefix, found in self._ranges.items():
                    if key.startswith(prefix):
                        found.note(key, is_there=value is not None)
        decoded = self._decoded
        if decoded is not None:
            for key, value in pending.items():
                if value is None or type(value) is bytes:
                    decoded.pop(key, None)
                else:
                    decoded[key] = cast(msgspec.Struct, value)
        self._kept.update(pending)
        self._pending = {}

    def drop(self) -> None:
        """Discard the pending changes.

        `schemas.streams.fold.settle` calls this when the record that made the changes was a duplicate or
        rejected.
        """
        if self._pending:
            self._pending = {}
        self._decoded = None

    def encode(self) -> None:
        """Encode the structs of accepted records now. A fold that fails later cannot change them any more."""
        for key, value in self._kept.items():
            if isinstance(value, msgspec.Struct):
                self._kept[key] = _encode(value)
        self._decoded = None

    def take_writes(self) -> Writes:
        """Return the changes applied by `keep` since the last call, and forget them.

        Each changed key is mapped to its newest bytes, or to `None` if the entry was deleted. The caller stores
        them. Entries without a `source` remain as they are.
        """
        self.encode()
        writes = cast(Writes, self._kept)
        self._kept, self._ranges = {}, None
        if isinstance(self._source, EntriesInMemory):
            for key, value in writes.items():
                self._source.put(key, value)
        return writes

    def stored(self) -> dict[str, bytes]:
        """Return all entries by key, without the pending changes. Call it only if there is no `source`."""
        if not isinstance(self._source, EntriesInMemory):
            raise TypeError("these entries are in a store: read them by key or by range")
        found = dict(self._source.by_key)
        for key, value in self._kept.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = _encode(value) if isinstance(value, msgspec.Struct) else value
        return found


class StructEntries(Generic[T]):
    """Typed access to entries whose values are instances of the struct `T`, encoded as msgpack.

    Args:
        key: the key of the only such entry, or the prefix that the keys of all such entries share.
        kind: the struct `T`.
        decode: decodes the stored bytes. `None` means a decoder of `kind`.
    """

    __slots__ = ("_decode", "key")

    def __init__(self, key: str, kind: type[T], decode: Callable[[bytes], T] | None = None) -> None:
        self.key = key
        self._decode = decode or msgspec.msgpack.Decoder(kind).decode

    def read(self, entries: Entries, rest: str = "") -> T | None:
        """Return the decoded value of the entry `self.key + rest`, or `None` if there is no such entry.

        `rest` is the part of the key that distinguishes entries with the same prefix, such as the name of a
        listener. It is empty if there is only one such entry. Raises msgspec.MsgspecError if the stored bytes
        are not a `T`.

        Change the value only to accept the record, and then call `write`.
        """
        return entries.struct(self.key + rest if rest else self.key, self._decode)

    def write(self, entries: Entries, value: T, rest: str = "") -> None:
        """Set the entry `self.key + rest` to `value`. The change is pending until the record is accepted.

        `rest` is the part of the key that distinguishes entries with the same prefix. It is empty if there is
        only one such entry.
        """
        entries.put(self.key + rest if rest else self.key, value)

    def delete(self, entries: Entries, rest: str = "") -> None:
        """Delete the entry `self.key + rest`, if any. The change is pending until the record is accepted."""
        entries.delete(self.key + rest)
