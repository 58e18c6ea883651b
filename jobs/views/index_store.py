"""The LMDB file of an index of a view table's keys: the shelf of each row, and the row's offset."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from jobs.views.view_changes import Key
from schemas.state_store.local_store import LocalStore, get_checked, put_checked

# A change of the form of keys or values needs a higher number. Indexes of another form are made again.
FORM: Final = 2
_VALUE: Final = struct.Struct(">iq")

RowPlace = tuple[bytes, bytes | None]
"""The name of a row in the index, and its encoded shelf and offset, or None if the row was removed."""


class Held(NamedTuple):
    """The shelf of a stored row, and the offset of the record that last changed the row.

    A shelf is a group of rows that are stored in the same files.
    """

    shelf: int
    offset: int


class IndexPosition(msgspec.Struct, frozen=True, array_like=True):
    """The state of the view table that an index has.

    Attributes:
        table: The id of the Delta table.
        form: The form of keys and values.
        version: The version of the table.
        digest: The SHA-256 of the commit that made the version. Empty if the commit was deleted.
    """

    table: str
    form: int
    version: int
    digest: str


class IndexStore(LocalStore[IndexPosition]):
    """The index in `folder`, which is created. Within a process, open each folder only once.

    Raises:
        StoreDamaged: The file is no store, is shorter than its content, or was made before the machine was
            started again.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, IndexPosition, is_of_this_boot=True)

    def held(self, keys: Iterable[Key]) -> dict[Key, Held]:
        """Return the shelf and the offset of each row that has one of these keys. Raises StoreDamaged."""
        found = {}
        with self._reading() as transaction:
            for key in keys:
                raw = get_checked(transaction, _name(key))
                if raw is not None:
                    found[key] = Held(*_VALUE.unpack(raw))
        return found

    def advance(self, before: IndexPosition | None, after: IndexPosition, changes: Iterable[RowPlace]) -> None:
        """Bring the index from one position to another. All of it or nothing.

        Args:
            before: The position that the index has. None: it is new.
            after: Its new position.
            changes: The changed rows, as `place_of` returns them. Sorted ones are written sooner.

        Raises:
            StoreMoved: The index has another position.
        """
        with self._changing(before) as transaction:
            for name, value in changes:
                if value is None:
                    transaction.delete(name)
                else:
                    put_checked(transaction, name, value)
            self._move(transaction, after)


def place_of(key: Key, held: Held | None) -> RowPlace:
    """Return the change of the index for a row. None: the row was removed."""
    return _name(key), None if held is None else _VALUE.pack(*held)


def _name(key: Key) -> bytes:
    """Return the name of a row in the index: 128 bits of a hash, because keys are two to four times as long."""
    # No value has a NUL.
    return hashlib.blake2b("\0".join(key).encode(), digest_size=16).digest()
