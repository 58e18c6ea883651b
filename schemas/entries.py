"""A stream's entries: the small key-value store that is all a fold knows of the past."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    entries that are kept apart and are not in `stored`.
    """

    __slots__ = ("_fetch", "_pending", "_stored", "_unsaved")

    def __init__(
        self, stored: dict[str, bytes] | None = None, fetch: Callable[[str], bytes | None] | None = None
    ) -> None:
        self._stored: dict[str, bytes] = {} if stored is None else stored
        self._fetch = fetch
        self._pending: Writes = {}
        self._unsaved: Writes = {}

    def get(self, key: str) -> bytes | None:
        """The entry's bytes, or None where there is none."""
        if key in self._pending:
            return self._pending[key]
        found = self._stored.get(key)
        if found is None and self._fetch is not None and key.startswith(APART) and key not in self._unsaved:
            found = self._fetch(key)
        return found

    def put(self, key: str, value: bytes) -> None:
        """Set an entry; it counts once the record is accepted."""
        self._pending[key] = value

    def delete(self, key: str) -> None:
        """Remove an entry; it counts once the record is accepted."""
        self._pending[key] = None

    def __iter__(self) -> Iterator[str]:
        """The keys, sorted, so that a fold that iterates is the same on every runner."""
        return iter(self.with_prefix(""))

    def with_prefix(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, sorted. Later changes do not show in the list."""
        pending = self._pending
        keys = [k for k in self._stored if k.startswith(prefix) and k not in pending]
        keys += [k for k, v in pending.items() if v is not None and k.startswith(prefix)]
        keys.sort()
        return keys

    def keep(self) -> None:
        """Make the pending changes part of the stream: its record was accepted."""
        for key, value in self._pending.items():
            if value is None:
                self._stored.pop(key, None)
            else:
                self._stored[key] = value
            self._unsaved[key] = value
        self._pending = {}

    def drop(self) -> None:
        """Forget the pending changes: their record was not accepted."""
        if self._pending:
            self._pending = {}

    def take_writes(self) -> Writes:
        """What was kept since the last call, coalesced to one write a key."""
        writes, self._unsaved = self._unsaved, {}
        return writes

    def stored(self) -> dict[str, bytes]:
        """All entries as they stand. A view: do not change it."""
        return self._stored
