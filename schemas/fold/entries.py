"""The entries of a stream: the small key-value store with all that a fold knows of earlier records."""

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

    A fold calls `get`, `put`, `delete` and `with_prefix`. `settle` then calls `keep` for an accepted record and
    `drop` for any other, so only accepted records change a stream. A runner calls `take_writes` to get the
    changes that it must store. Keys are short ASCII text; values are bytes that begin with a version. Not
    thread-safe.

    Args:
        stored: the stored entries, which are copied. It may lack entries with the prefix `APART`.
        fetch: returns a stored entry with the prefix `APART`, or `None` if there is none. It is called only for
            such keys that are not in `stored`. `None` means that `stored` is complete.
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
        """Add a stored entry, which counts as no change. The stream must not have an entry with this key."""
        (self._apart if key.startswith(APART) else self._stored)[key] = value
        if self._keys is not None:
            self._keys = None

    def get(self, key: str) -> bytes | None:
        """Return the bytes of an entry with the pending changes applied, or `None` if it does not exist."""
        if key in self._pending:
            return self._pending[key]
        if not key.startswith(APART):
            return self._stored.get(key)
        found = self._apart.get(key)
        if found is None and self._fetch is not None and key not in self._unsaved:
            found = self._fetch(key)
        return found

    def put(self, key: str, value: bytes) -> None:
        """Set an entry. The change is pending until the record is accepted."""
        self._pending[key] = value

    def delete(self, key: str) -> None:
        """Delete an entry. The change is pending until the record is accepted."""
        self._pending[key] = None

    def with_prefix(self, prefix: str) -> Iterator[str]:
        """Iterate over the keys with this prefix in sorted order, without keys that begin with `APART`.

        Pending changes made before the call are included; changes made during the iteration are not. Keys are
        produced lazily, so reading only the first is cheap even if there are many.
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
        """Apply the pending changes, because their record was accepted."""
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
        """Discard the pending changes, because their record was not accepted."""
        if self._pending:
            self._pending = {}

    def take_writes(self) -> Writes:
        """Return the changes that were kept since the last call, with one write for each key."""
        writes, self._unsaved = self._unsaved, {}
        return writes

    def stored(self) -> dict[str, bytes]:
        """Return all entries without the pending changes. The caller must not modify the result."""
        return {**self._stored, **self._apart} if self._apart else self._stored

    def copy(self) -> Entries:
        """Return an independent copy without the pending changes. Its `take_writes` starts empty."""
        return Entries(self.stored(), self._fetch)


class StructEntries(Generic[T]):
    """Typed access to entries whose values are the struct `T` in msgpack: one entry, or all with a prefix."""

    __slots__ = ("_decode", "_encode", "key")

    def __init__(self, key: str, kind: type[T]) -> None:
        self.key = key
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def read(self, entries: Entries, rest: str = "") -> T | None:
        """Return the value of the entry `key` + `rest`, or `None` if there is none."""
        raw = entries.get(self.key + rest)
        return None if raw is None else self._decode(raw)

    def write(self, entries: Entries, value: T, rest: str = "") -> None:
        """Set the value of the entry `key` + `rest`. The change is pending until the record is accepted."""
        entries.put(self.key + rest, self._encode(value))


def _from(keys: list[str], prefix: str) -> Iterator[str]:
    for at in range(bisect_left(keys, prefix), len(keys)):
        if not keys[at].startswith(prefix):
            return
        yield keys[at]
