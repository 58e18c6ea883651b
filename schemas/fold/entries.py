"""The entries of a stream: a small key-value store with all that the fold remembers of earlier records."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from typing import Final, Generic, TypeVar

import msgspec

T = TypeVar("T")

Writes = dict[str, bytes | None]
"""The changed entries: each key with its new bytes, or with `None` if the entry was deleted."""
# A stream may have many entries with this prefix. A fold reads them by key, never iterates over them and never
# deletes them. A runner may therefore store them separately and fetch each one when the fold reads it.
APART: Final = "id/"


class Entries:
    """The entries of one stream, and the pending changes of the record that is being settled.

    While a record is settled, the fold of its kind calls `get`, `put`, `delete` and `with_prefix`. Then
    `schemas.streams.fold.settle` calls `keep` for an accepted record and `drop` for any other, so only accepted
    records change a stream. A runner (the gateway or a Spark job) calls `take_writes` to get the changes that
    it must store. Keys are short ASCII text; values are bytes. Not thread-safe.

    Args:
        stored: the stored entries, which are copied. `None` means none. Entries whose keys begin with `APART`
            (`id/`) may be missing if `fetch` is given.
        fetch: returns the bytes of one stored entry by its key, or `None` if there is no such entry. It is
            called only for keys that begin with `APART` and are not in `stored`. Pass no `fetch` if `stored` is
            complete.
    """

    __slots__ = ("_apart", "_fetch", "_keys", "_pending", "_stored", "_unsaved")

    def __init__(
        self, stored: Mapping[str, bytes] | None = None, fetch: Callable[[str], bytes | None] | None = None
    ) -> None:
        self._stored: dict[str, bytes] = {}
        # There may be thousands of these beside a few others, so `with_prefix` must not iterate over them.
        self._apart: dict[str, bytes] = {}
        # The sorted keys of _stored, or None until `with_prefix` needs them.
        self._keys: list[str] | None = None
        self._fetch = fetch
        self._pending: Writes = {}
        self._unsaved: Writes = {}
        for key, value in ({} if stored is None else stored).items():
            self.load(key, value)

    def load(self, key: str, value: bytes) -> None:
        """Add an entry that was read from storage. It is not a change, so `take_writes` does not return it.

        `value` has the stored bytes. Call it only for a key that the stream does not have yet; this is not
        checked.
        """
        (self._apart if key.startswith(APART) else self._stored)[key] = value
        if self._keys is not None:
            self._keys = None

    def get(self, key: str) -> bytes | None:
        """Return the bytes of the entry `key`, or `None` if it does not exist. Pending changes are included.

        For a key that begins with `id/` and is not in memory, the constructor's `fetch` is called, which may
        read from storage.
        """
        if key in self._pending:
            return self._pending[key]
        if not key.startswith(APART):
            return self._stored.get(key)
        found = self._apart.get(key)
        if found is None and self._fetch is not None and key not in self._unsaved:
            found = self._fetch(key)
        return found

    def put(self, key: str, value: bytes) -> None:
        """Set the entry `key` to `value`. The change is pending: `keep` applies it, and `drop` discards it."""
        self._pending[key] = value

    def delete(self, key: str) -> None:
        """Delete the entry `key`, if any. The change is pending: `keep` applies it, and `drop` discards it."""
        self._pending[key] = None

    def with_prefix(self, prefix: str) -> Iterator[str]:
        """Return an iterator over the keys that begin with `prefix`, in sorted order.

        Keys that begin with `APART` (`id/`) are left out. Pending changes made before the call are included;
        changes made during the iteration are not. Reading only the first key is cheap even if there are many.
        """
        if self._keys is None:
            self._keys = sorted(self._stored)
        keys, pending = _from(self._keys, prefix), dict(self._pending)
        if not pending:
            return keys
        drafts = (key for key, value in pending.items() if value is not None and key.startswith(prefix))
        return merge(
            (key for key in keys if key not in pending),
            sorted(key for key in drafts if not key.startswith(APART)),
        )

    def keep(self) -> None:
        """Apply the pending changes. The next call of `take_writes` returns them, too.

        `schemas.streams.fold.settle` calls this when it has accepted the record that made the changes.
        """
        for key, value in self._pending.items():
            if key.startswith(APART):
                self._keep_one(self._apart, key, value)
            else:
                if self._keys is not None:
                    self._note_key(self._keys, key, value is not None)
                self._keep_one(self._stored, key, value)
            self._unsaved[key] = value
        self._pending = {}

    @staticmethod
    def _keep_one(kept: dict[str, bytes], key: str, value: bytes | None) -> None:
        if value is None:
            kept.pop(key, None)
        else:
            kept[key] = value

    def _note_key(self, keys: list[str], key: str, is_there: bool) -> None:
        """Update the sorted keys. Must be called before the entry itself changes."""
        if is_there == (key in self._stored):
            return
        if is_there:
            insort(keys, key)
        else:
            del keys[bisect_left(keys, key)]

    def drop(self) -> None:
        """Discard the pending changes.

        `schemas.streams.fold.settle` calls this when the record that made the changes was a duplicate or
        rejected.
        """
        if self._pending:
            self._pending = {}

    def take_writes(self) -> Writes:
        """Return the changes applied by `keep` since the last call, and forget them.

        Each changed key is mapped to its newest bytes, or to `None` if the entry was deleted. The caller stores
        them.
        """
        writes, self._unsaved = self._unsaved, {}
        return writes

    def stored(self) -> dict[str, bytes]:
        """Return the entries that are in memory, by key, without the pending changes. Storage is not read.

        They are all entries of the stream if this object was created without `fetch`. Otherwise entries may be
        missing whose keys begin with `id/`: `get` reads them through `fetch` and does not keep them in memory.
        The caller must not modify the result.
        """
        return {**self._stored, **self._apart} if self._apart else self._stored

    def copy(self) -> Entries:
        """Return an independent copy of the entries in memory, with the same `fetch`.

        The copy has no pending changes, and its `take_writes` returns only changes made to the copy.
        """
        return Entries(self.stored(), self._fetch)


class StructEntries(Generic[T]):
    """Typed access to entries whose values are instances of the struct `T`, encoded as msgpack.

    Args:
        key: the key of the only such entry, or the prefix that the keys of all such entries share.
        kind: the struct `T`.
    """

    __slots__ = ("_decode", "_encode", "key")

    def __init__(self, key: str, kind: type[T]) -> None:
        self.key = key
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def read(self, entries: Entries, rest: str = "") -> T | None:
        """Return the decoded value of the entry `self.key + rest`, or `None` if there is no such entry.

        `rest` is the part of the key that distinguishes entries with the same prefix, such as the name of a
        listener. It is empty if there is only one such entry. Raises msgspec.MsgspecError if the stored bytes
        are not a `T`.
        """
        raw = entries.get(self.key + rest)
        return None if raw is None else self._decode(raw)

    def write(self, entries: Entries, value: T, rest: str = "") -> None:
        """Set the entry `self.key + rest` to `value`. The change is pending until the record is accepted.

        `rest` is the part of the key that distinguishes entries with the same prefix. It is empty if there is
        only one such entry.
        """
        entries.put(self.key + rest, self._encode(value))


def _from(keys: list[str], prefix: str) -> Iterator[str]:
    for at in range(bisect_left(keys, prefix), len(keys)):
        if not keys[at].startswith(prefix):
            return
        yield keys[at]
