"""The local store of one Kafka partition: the entries of its streams as of an offset, in an LMDB file.

A store has a *position*: the offset up to which its entries are those of the ledger. Entries and position
change in one transaction of LMDB, which is on disk before it ends. Every change names the position that it
starts from, and is refused at any other. So a second writer cannot spoil a store, and a store that lags behind
can be brought forward from any committed state (decision 0029).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lmdb
import msgspec

from schemas.errors import TrunklineError
from schemas.fold.entries import EntriesUnreadable

# Bytes of address space, not of memory or disk.
_MAP_BYTES: Final = 1 << 38
_CHECK_BYTES: Final = 4
_DAMAGE: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)
# Below all keys of entries, which begin with a letter.
_POSITION: Final = b"\x00position"

EntryChange = tuple[str, str, bytes | None]
"""A stream, the key of one of its entries, and the new bytes, or None if the entry is deleted."""


class StoreMoved(TrunklineError):
    """The store is at another position than the change starts from, so nothing was changed."""


class StoreDamaged(EntriesUnreadable):
    """The store's file cannot be read, or an entry's checksum does not fit. Delete the store.

    Not all damage is noticed: LMDB has no checksum of its pages, so an overwritten page may hide an entry.
    """


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


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Position).decode


class Snapshot:
    """The entries of a store at one position. Made by `PartitionStore.snapshot`; valid within its block."""

    def __init__(self, transaction: lmdb.Transaction, position: Position | None) -> None:
        self._transaction = transaction
        self.position = position

    def stream(self, name: str) -> StoredEntries:
        """Return the entries of the stream `name`, such as `job/0a1b2c3d`. An unknown stream has none."""
        return StoredEntries(self._transaction, name)


class StoredEntries:
    """The entries of one stream in a snapshot: an `EntrySource`. Valid as long as the snapshot.

    A stream may have very many entries, so they are read by key, or in order as far as needed.
    """

    __slots__ = ("_prefix", "_transaction")

    def __init__(self, transaction: lmdb.Transaction, stream: str) -> None:
        self._transaction = transaction
        self._prefix = _key(stream, "")

    def get(self, key: str) -> bytes | None:
        """Return the bytes of one entry, or None if there is no such entry.

        Raises:
            StoreDamaged: the checksum does not fit.
        """
        stored = self._prefix + key.encode("ascii")
        try:
            raw = self._transaction.get(stored)
        except _DAMAGE as error:
            raise _damaged(error) from error
        return None if raw is None else _checked(stored, bytes(raw))

    def keys(self, prefix: str, after: str, most: int) -> list[str]:
        """Return the first keys that begin with `prefix` and are greater than `after`, in order.

        At most `most` keys are returned. Fewer mean that there are no more.

        Raises:
            StoreDamaged: LMDB finds damage.
        """
        wanted, start = self._prefix + prefix.encode("ascii"), len(self._prefix)
        # No key is between `after` and `after` with a NUL.
        begin = max(wanted, self._prefix + after.encode("ascii") + b"\x00")
        found: list[str] = []
        with _damage_told(), self._transaction.cursor() as cursor:
            if cursor.set_range(begin):
                for key in map(bytes, cursor.iternext(keys=True, values=False)):
                    if len(found) == most or not key.startswith(wanted):
                        break
                    found.append(key[start:].decode("ascii"))
        return found


class PartitionStore:
    """The store of one partition in `folder`, which is created. Several processes may have it open.

    Within a process, open each folder only once.

    Raises:
        StoreDamaged: the file is no store, or is shorter than its content.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, readahead=False, mode=0o700)
        except lmdb.Error as error:
            raise StoreDamaged(f"the state store {folder} cannot be opened: {error}") from error
        self._file = folder / "data.mdb"
        pages, known = self._env.info()["last_pgno"] + 1, self._file.stat()
        if known.st_size < pages * self._env.stat()["psize"]:
            self._env.close()
            raise StoreDamaged(f"the state store {folder} has been truncated")
        self._inode, self._size = known.st_ino, known.st_size
        # Slots of readers that were killed would keep old pages from being used again.
        self._env.reader_check()

    def close(self) -> None:
        """Close the files. Snapshots are then invalid."""
        self._env.close()

    def is_whole(self) -> bool:
        """Return whether the folder still has the file that is open, and at least as much of it as before.

        Call it before each use: to read what is missing at the end of an open file ends the process (SIGBUS).
        If it is False, close the store and open the folder again.
        """
        try:
            found = self._file.stat()
        except FileNotFoundError:
            return False
        is_whole = found.st_ino == self._inode and found.st_size >= self._size
        self._size = max(self._size, found.st_size)
        return is_whole

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Read the store as it is now, for the length of the block. Later changes are not seen."""
        with _damage_told(), self._env.begin() as transaction:
            yield Snapshot(transaction, _position(transaction))

    def position(self) -> Position | None:
        """Return the store's position, or None if it has none: it is new."""
        with self.snapshot() as snapshot:
            return snapshot.position

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
                _write(transaction, stream, entry, value)
            transaction.put(_POSITION, _encode(after))

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
            transaction.drop(self._env.open_db(txn=transaction), delete=False)
            for stream, entry, value in changes:
                _write(transaction, stream, entry, value)
            transaction.put(_POSITION, _encode(after))

    @contextmanager
    def _changing(self, before: Position | None) -> Iterator[lmdb.Transaction]:
        """Begin a transaction that writes, if the store has this position. An error in the block undoes it."""
        with _damage_told(), self._env.begin(write=True) as transaction:
            if (found := _position(transaction)) != before:
                raise StoreMoved(f"the state store is at {found}, not at {before}")
            yield transaction


@contextmanager
def _damage_told() -> Iterator[None]:
    """Raise StoreDamaged if LMDB finds pages that are not as they were written."""
    try:
        yield
    except _DAMAGE as error:
        raise _damaged(error) from error


def _damaged(error: lmdb.Error) -> StoreDamaged:
    return StoreDamaged(f"the state store is damaged: {error}")


def _position(transaction: lmdb.Transaction) -> Position | None:
    raw = transaction.get(_POSITION)
    try:
        return None if raw is None else _decode(raw)
    except msgspec.DecodeError as error:
        raise StoreDamaged(f"the state store's position is damaged: {error}") from error


def _key(stream: str, entry: str) -> bytes:
    return f"{stream}\x00{entry}".encode("ascii")


def _write(transaction: lmdb.Transaction, stream: str, entry: str, value: bytes | None) -> None:
    key = _key(stream, entry)
    if value is None:
        transaction.delete(key)
    else:
        transaction.put(key, zlib.crc32(value, zlib.crc32(key)).to_bytes(_CHECK_BYTES, "big") + value)


def _checked(key: bytes, raw: bytes) -> bytes:
    value = raw[_CHECK_BYTES:]
    if int.from_bytes(raw[:_CHECK_BYTES], "big") != zlib.crc32(value, zlib.crc32(key)):
        raise StoreDamaged(f"the state store's entry {key!r} is damaged")
    return value
