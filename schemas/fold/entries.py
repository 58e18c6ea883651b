"""A stream's entries: the small key-value store that is all a fold knows of the past."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from typing import Final

Writes = dict[str, bytes | None]
"""Entry key to its new bytes, None where the entry was deleted."""
# Entries whose keys begin so may be many, and a fold asks for one by its key and never iterates over them: a
# runner may keep them apart, and fetch one when it is asked for. They are not deleted.
APART: Final = "id/"


class Entries:
    """The entries of one stream, with what the record being settled wants to change kept apart.

    The fold calls get, put, delete and iterates. `settle` calls `keep` for an accepted record and `drop`
    for any other, so only accepted records change anything. A runner calls `take_writes` when it
    is time to store. Keys are short ASCII text, values are versioned bytes of the fold. `fetch` gives the
    entries that are kept apart and are not in `stored`, which is copied.
    """

    __slots__ = ("_apart", "_fetch", "_keys", "_pending", "_stored", "_unsaved")

    def __init__(
        self, stored: Mapping[str, bytes] | None = None, fetch: Callable[[str], bytes | None] | None = None
    ) -> None:
        self._stored: dict[str, bytes] = {}
        # Thousands beside a handful: who goes through the others must not meet them.
        self._apart: dict[str, bytes] = {}
        # The keys of _stored, sorted, from the first time that somebody goes through them.
        self._keys: list[str] | None = None
        self._fetch = fetch
        self._pending: Writes = {}
        self._unsaved: Writes = {}
        for key, value in ({} if stored is None else stored).items():
            self.load(key, value)

    def load(self, key: str, value: bytes) -> None:
        """Add an entry that is stored already: it is no change, and the stream has no such key yet."""
        (self._apart if key.startswith(APART) else self._stored)[key] = value
        if self._keys is not None:
            self._keys = None

    def get(self, key: str) -> bytes | None:
        """The entry's bytes, or None where there is none."""
        if key in self._pending:
            return self._pending[key]
        if not key.startswith(APART):
            return self._stored.get(key)
        found = self._apart.get(key)
        if found is None and self._fetch is not None and key not in self._unsaved:
            found = self._fetch(key)
        return found

    def put(self, key: str, value: bytes) -> None:
        """Set an entry; it counts once the record is accepted."""
        self._pending[key] = value

    def delete(self, key: str) -> None:
        """Remove an entry; it counts once the record is accepted."""
        self._pending[key] = None

    def with_prefix(self, prefix: str) -> Iterator[str]:
        """The keys that begin with `prefix`, sorted, as they stand now; none of those that are kept apart.

        Later changes of the same record do not show. The first of many costs no more than the first of few.
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
        """Make the pending changes part of the stream: its record was accepted."""
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
        """Keep the sorted keys true. To be called before the entry itself changes."""
        if is_there == (key in self._stored):
            return
        if is_there:
            insort(keys, key)
        else:
            del keys[bisect_left(keys, key)]

    def drop(self) -> None:
        """Forget the pending changes: their record was not accepted."""
        if self._pending:
            self._pending = {}

    def take_writes(self) -> Writes:
        """What was kept since the last call, coalesced to one write a key."""
        writes, self._unsaved = self._unsaved, {}
        return writes

    def stored(self) -> dict[str, bytes]:
        """All entries as they stand. It may be a view: do not change it."""
        return {**self._stored, **self._apart} if self._apart else self._stored

    def copy(self) -> Entries:
        """The same entries, to be changed without an effect on these. What was not taken is not copied."""
        return Entries(self.stored(), self._fetch)


def _from(keys: list[str], prefix: str) -> Iterator[str]:
    for at in range(bisect_left(keys, prefix), len(keys)):
        if not keys[at].startswith(prefix):
            return
        yield keys[at]
