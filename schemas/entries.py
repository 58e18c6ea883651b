"""A stream's entries: the small key-value store that is all a fold knows of the past."""

from __future__ import annotations

from collections.abc import Iterator

Writes = dict[str, bytes | None]
"""Entry key to its new bytes, None where the entry was deleted."""


class Entries:
    """The entries of one stream, with what the record being settled wants to change kept apart.

    The fold calls get, put, delete and iterates. `settle` calls `keep` for an accepted record and `drop`
    for any other, so only accepted records change anything. A runner calls `take_writes` when it
    is time to store. Keys are short ASCII text, values are versioned bytes of the fold.
    """

    __slots__ = ("_pending", "_stored", "_unsaved")

    def __init__(self, stored: dict[str, bytes] | None = None) -> None:
        self._stored: dict[str, bytes] = {} if stored is None else stored
        self._pending: Writes = {}
        self._unsaved: Writes = {}

    def get(self, key: str) -> bytes | None:
        """The entry's bytes, or None where there is none."""
        if key in self._pending:
            return self._pending[key]
        return self._stored.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Set an entry; it counts once the record is accepted."""
        self._pending[key] = value

    def delete(self, key: str) -> None:
        """Remove an entry; it counts once the record is accepted."""
        self._pending[key] = None

    def __iter__(self) -> Iterator[str]:
        """The keys, sorted, so that a fold that iterates is the same on every runner."""
        keys = {k for k in self._stored if k not in self._pending}
        return iter(sorted(keys | {k for k, v in self._pending.items() if v is not None}))

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
