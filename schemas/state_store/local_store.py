"""The parts that all local stores share: an LMDB file with a position, checksums, and damage handling."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

import lmdb
import msgspec

from schemas.fold.entries import EntriesUnreadable
from trunkline_agent.errors import TrunklineError

# Bytes of address space, not of memory or disk. A larger file gets twice its size.
_MAP_BYTES: Final = 1 << 38
_CHECK_BYTES: Final = 4
_DAMAGE: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)
# Below all other keys.
_POSITION: Final = b"\x00position"
# The lock file of 126 readers.
_LOCK_BYTES: Final = 8192
# Random for each start of a Linux kernel (proc_sys_kernel(5)). A container has that of its host.
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_CLOSE_S: Final = 10.0
_PAUSE_S: Final = 1.0
_TICK_S: Final = 0.001
PositionT = TypeVar("PositionT", bound=msgspec.Struct)

_encode: Final = msgspec.msgpack.Encoder().encode


class StoreMoved(TrunklineError):
    """The store is at another position than the change starts from, so nothing was changed."""


class StoreDamaged(EntriesUnreadable):
    """The store's file cannot be read, or a value's checksum does not fit. Delete the store.

    Not all damage is noticed: LMDB has no checksum of its pages, so an overwritten page may hide a value.
    """


class StoreClosed(TrunklineError):
    """The store has been closed, because its program ends."""


class LocalStore(Generic[PositionT]):
    """A store in `folder`, which is created. Several processes may have it open.

    Within a process, open each folder only once.

    Args:
        folder: The folder of the store's files.
        position_type: The class of the store's position.
        is_synced: Whether each transaction is on disk when it ends. Without it, a kill of the process costs
            nothing, but after a crash of the machine the store must be deleted.
        is_of_this_boot: Do not sync, and take a store for damaged that was made before the machine's last
            start. Where the system does not name its starts, the store is synced instead.

    Attributes:
        on_damage: Called with the error when a read finds damage, before it is raised. Any thread may call it.

    Raises:
        StoreDamaged: The file is no store, is shorter than its content, or is of an earlier start.
        TrunklineError: The folder cannot be written, or its disk is full.
    """

    def __init__(
        self,
        folder: Path,
        position_type: type[PositionT],
        *,
        is_synced: bool = True,
        is_of_this_boot: bool = False,
    ) -> None:
        self._folder, self._file = folder, folder / "data.mdb"
        self._make_folder()
        self._is_synced = not self._boot_is_noted() if is_of_this_boot else is_synced
        self._env = self._opened()
        self._decode_position = msgspec.msgpack.Decoder(position_type).decode
        known = self._file.stat()
        if known.st_size < self._bytes_used():
            self._env.close()
            raise StoreDamaged(f"the state store {folder} has been truncated")
        self._inode, self._size = known.st_ino, known.st_size
        # Slots of readers that were killed would keep old pages from being used again.
        self._env.reader_check()
        self._at_work: set[object] = set()
        self.on_damage: Callable[[StoreDamaged], None] = _ignore
        self._is_closed = self._is_paused = False

    def _opened(self) -> lmdb.Environment:
        most = max(_MAP_BYTES, 2 * self._file.stat().st_size if self._file.exists() else 0)
        try:
            return lmdb.open(
                str(self._folder), map_size=most, readahead=False, mode=0o700, sync=self._is_synced
            )
        except (*_DAMAGE, lmdb.VersionMismatchError) as error:
            raise StoreDamaged(f"the state store {self._folder} cannot be opened: {error}") from error
        except (lmdb.Error, OSError) as error:
            # Another store in its place would not be opened, either.
            raise TrunklineError(f"the state store {self._folder} cannot be opened: {error}") from error

    def _bytes_used(self) -> int:
        """Return how long the file is if it has all pages, also free ones at its end."""
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def _extend(self) -> None:
        """Extend the file to its last page, which LMDB does not write if the page became free at once.

        The next open would take the shorter file for a truncated one. The new part is a hole in the file, so it
        needs no disk space.
        """
        with suppress(OSError):
            if self._file.stat().st_size < (used := self._bytes_used()):
                os.truncate(self._file, used)

    def _make_folder(self) -> None:
        """Create the folder, and take the disk space of LMDB's lock file, which is written by a memory map.

        Without the space such a write would end the process (SIGBUS).
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._folder / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(lock, 0, _LOCK_BYTES)
            finally:
                os.close(lock)
        except OSError as error:
            raise TrunklineError(f"the state store {self._folder} cannot be opened: {error}") from error

    def _boot_is_noted(self) -> bool:
        """Note in the folder when the machine was started. False: the system does not say when.

        Raises:
            StoreDamaged: The store was made before that, or its folder does not say when.
        """
        boot, noted = boot_id(), self._folder / "boot_id"
        if not boot:
            return False
        if not self._file.exists():
            # By a rename, because another process may be creating the same store and must not read half of it.
            made = noted.with_suffix(f".{os.getpid()}")
            try:
                made.write_text(boot, encoding="ascii")
                made.replace(noted)
            except OSError as error:
                raise TrunklineError(f"the state store {self._folder} cannot be opened: {error}") from error
        elif not noted.exists() or noted.read_bytes() != boot.encode("ascii"):
            raise StoreDamaged(f"the state store {self._folder} was made before the machine was started again")
        return True

    def reopen(self) -> None:
        """Map the file into memory anew, so that pages read before do not count as memory of this process.

        A file that is as large as its map (lmdb.MapFullError) gets a map of twice the size.
        This waits up to a second for a moment without transactions; without one, nothing is done. Transactions
        begin as usual during the wait.

        Raises:
            StoreDamaged: The file cannot be opened again.
        """
        deadline = time.monotonic() + _PAUSE_S
        while not self._is_opened_anew() and time.monotonic() < deadline:
            time.sleep(_TICK_S)

    def _is_opened_anew(self) -> bool:
        """Map the file anew unless it is in use, and return whether that is done or will never be."""
        self._is_paused = True
        try:
            if self._at_work:
                return False
            # A file that was deleted stays readable only as long as it is open.
            if self.is_whole():
                self._env.close()
                self._env = self._opened()
            return True
        finally:
            self._is_paused = False

    def close(self) -> None:
        """Close the files, once the transactions of other threads have ended, or after ten seconds.

        Later calls raise StoreClosed. Within a thread, do not call it during a transaction.
        """
        self._is_closed = True
        # A thread that reads closed files would end the process.
        if self._is_idle(_CLOSE_S):
            self._env.close()

    def _is_idle(self, timeout_s: float) -> bool:
        """Wait for the end of all transactions, and return whether they ended in time."""
        deadline = time.monotonic() + timeout_s
        while self._at_work and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        return not self._at_work

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

    def position(self) -> PositionT | None:
        """Return the store's position, or None if it has none: it is new."""
        with self._reading() as transaction:
            return self._position(transaction)

    def _read(self, key: bytes) -> bytes | None:
        """Return a value as the store has it now, or None. Reports damage. The fold calls it very often."""
        mine = self._begin_work()
        try:
            with self._env.begin() as transaction:
                return get_checked(transaction, key)
        except (StoreDamaged, *_DAMAGE) as error:
            told = error if isinstance(error, StoreDamaged) else _damaged(error)
            self.on_damage(told)
            raise told from error
        finally:
            self._at_work.discard(mine)

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        """Read the store as it is now, for the length of the block. Reports damage."""
        mine = self._begin_work()
        try:
            with _damage_told(), self._env.begin() as transaction:
                yield transaction
        except StoreDamaged as error:
            self.on_damage(error)
            raise
        finally:
            self._at_work.discard(mine)

    @contextmanager
    def _changing(self, before: PositionT | None) -> Iterator[lmdb.Transaction]:
        """Begin a transaction that writes, if the store has this position. An error in the block undoes it."""
        mine = self._begin_work()
        try:
            with _damage_told(), self._env.begin(write=True) as transaction:
                if (found := self._position(transaction)) != before:
                    raise StoreMoved(f"the state store is at {found}, not at {before}")
                yield transaction
            self._extend()
        finally:
            self._at_work.discard(mine)

    def _begin_work(self) -> object:
        """Keep the files open until the returned object is removed from `_at_work`. Raises StoreClosed."""
        mine = object()
        self._at_work.add(mine)
        while self._is_paused:
            self._at_work.discard(mine)
            time.sleep(_TICK_S)
            self._at_work.add(mine)
        if self._is_closed:
            self._at_work.discard(mine)
            raise StoreClosed("the state store has been closed")
        return mine

    def _move(self, transaction: lmdb.Transaction, after: PositionT) -> None:
        put_checked(transaction, _POSITION, _encode(after))

    def _clear(self, transaction: lmdb.Transaction) -> None:
        """Delete everything in the store, also its position."""
        transaction.drop(self._env.open_db(txn=transaction), delete=False)

    def _position(self, transaction: lmdb.Transaction) -> PositionT | None:
        raw = get_checked(transaction, _POSITION)
        try:
            return None if raw is None else self._decode_position(raw)
        except msgspec.MsgspecError as error:
            raise StoreDamaged(f"the state store's position is damaged: {error}") from error


class StoredEntries:
    """The entries of one stream in a transaction: an `EntrySource`. Valid as long as the transaction.

    A stream may have very many entries, so they are read by key, or in order as far as needed.
    """

    __slots__ = ("_prefix", "_transaction")

    def __init__(self, transaction: lmdb.Transaction, stream: str) -> None:
        self._transaction = transaction
        self._prefix = entry_key(stream, "")

    def get(self, key: str) -> bytes | None:
        """Return the bytes of one entry, or None if there is no such entry.

        Raises:
            StoreDamaged: The checksum does not fit.
        """
        return get_checked(self._transaction, self._prefix + key.encode("ascii"))

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


@contextmanager
def _damage_told() -> Iterator[None]:
    """Raise StoreDamaged if LMDB finds pages that are not as they were written."""
    try:
        yield
    except _DAMAGE as error:
        raise _damaged(error) from error


def _damaged(error: lmdb.Error) -> StoreDamaged:
    return StoreDamaged(f"the state store is damaged: {error}")


def entry_key(stream: str, entry: str) -> bytes:
    """Return the key of a stream's entry in a store. It begins with a letter."""
    return f"{stream}\x00{entry}".encode("ascii")


def put_checked(transaction: lmdb.Transaction, key: bytes, value: bytes, *, is_new: bool = False) -> bool:
    """Write a value with its checksum. With `is_new`, False, and nothing is written, if the key exists."""
    checksum = zlib.crc32(value, zlib.crc32(key)).to_bytes(_CHECK_BYTES, "big")
    return bool(transaction.put(key, checksum + value, overwrite=not is_new))


def get_checked(transaction: lmdb.Transaction, key: bytes) -> bytes | None:
    """Return a value, or None if there is no such key. Raises StoreDamaged if it cannot be read as written."""
    try:
        # Not by `_damage_told`, because each read of the fold comes here.
        raw = transaction.get(key)
    except _DAMAGE as error:
        raise _damaged(error) from error
    return None if raw is None else checked(key, bytes(raw))


def checked(key: bytes, raw: bytes) -> bytes:
    """Return a value without its checksum. Raises StoreDamaged if the checksum does not fit."""
    value = raw[_CHECK_BYTES:]
    if int.from_bytes(raw[:_CHECK_BYTES], "big") != zlib.crc32(value, zlib.crc32(key)):
        raise StoreDamaged(f"the value of {key!r} in the state store is damaged")
    return value


def write_entry(transaction: lmdb.Transaction, stream: str, entry: str, value: bytes | None) -> None:
    """Write an entry of a stream, or delete it if `value` is None."""
    key = entry_key(stream, entry)
    if value is None:
        transaction.delete(key)
    else:
        put_checked(transaction, key, value)


def boot_id() -> str:
    """Return the id of the machine's last start, or an empty text where starts have none: not on Linux."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _ignore(error: StoreDamaged) -> None:
    """Do nothing."""
