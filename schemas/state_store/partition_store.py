"""The local store of one Kafka partition: the entries of its streams as of an offset, in an LMDB file.

A store has a *position*: the offset up to which its entries are those of the ledger. Entries and position
change in one transaction of LMDB. Every change names the position that it starts from, and is refused at any
other. So a second writer cannot spoil a store, and a store that lags behind can be brought forward from any
committed state (decision 0029). After a start of the machine the store is made anew, so nothing is synced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec

from schemas.state_store.local_store import LocalStore, StoredEntries, write_entry

EntryChange = tuple[str, str, bytes | None]
"""A stream, the key of one of its entries, and the new bytes, or None if the entry is deleted."""


class Position(msgspec.Struct, frozen=True, array_like=True):
    """The state that a store contains.

    Attributes:
        table: the id of the Delta table `ledger`.
        epoch: the epoch of the topic.
        fold_version: the version of the fold that made the entries.
        offset: the first offset of the partition that is not in the store.
        chain: the value of the audit chain's entry for the last commit below `offset` with rows of the
            partition. Empty without such a commit.
    """

    table: str
    epoch: int
    fold_version: int
    offset: int
    chain: str


class Snapshot:
    """The entries of a store at one position. Made by `PartitionStore.snapshot`; valid within its block."""

    def __init__(self, transaction: lmdb.Transaction, position: Position | None) -> None:
        self._transaction = transaction
        self.position = position

    def stream(self, name: str) -> StoredEntries:
        """Return the entries of the stream `name`, such as `job/0a1b2c3d`. An unknown stream has none."""
        return StoredEntries(self._transaction, name)


class PartitionStore(LocalStore[Position]):
    """The store of one partition in `folder`, which is created. Several processes may have it open.

    Within a process, open each folder only once.

    Args:
        folder: the folder of the store's files.

    Raises:
        StoreDamaged: the file is no store, is shorter than its content, or was made before the machine was
            started again.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Position, is_of_this_boot=True)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Read the store as it is now, for the length of the block. Later changes are not seen."""
        with self._reading() as transaction:
            yield Snapshot(transaction, self._position(transaction))

    def advance(self, before: Position, after: Position, changes: Iterable[EntryChange]) -> None:
        """Bring the store from one position to the next, by the changes of a commit. All of it or nothing.

        Args:
            before: the position that the store has.
            after: its new position.
            changes: the last change of each entry.

        Raises:
            StoreMoved: the store has another position.
        """
        with self._changing(before) as transaction:
            for stream, entry, value in changes:
                write_entry(transaction, stream, entry, value)
            self._move(transaction, after)

    def load(self, before: Position | None, after: Position, changes: Iterable[EntryChange]) -> None:
        """Replace everything in the store. All of it or nothing.

        Args:
            before: the position that the store has. None: it has none.
            after: the position of the new content.
            changes: the entries, and changes of them in order.

        Raises:
            StoreMoved: the store has another position.
        """
        # One transaction takes a third of the time of many, and others see the old content until its end.
        with self._changing(before) as transaction:
            self._clear(transaction)
            for stream, entry, value in changes:
                write_entry(transaction, stream, entry, value)
            self._move(transaction, after)
