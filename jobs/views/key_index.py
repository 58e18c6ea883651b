"""The index of a view table's keys: the shelf of each row, and the row's offset, in an LMDB file.

The index is a cache of the table. Its position names the table, its version, and the digest of the commit that
made the version. An index that lags behind gets the keys in the files that differ. Any other is made again from
the keys of all rows (decision 0030).
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import orjson
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from jobs.views.view_changes import Key, key_columns
from schemas.state_store.local_store import LocalStore, StoreDamaged, get_checked, put_checked
from schemas.tables.delta_files import TableRows, dataset_of, table_storage

# A change of the form of keys or values needs a higher number. Indexes of another form are made again.
_FORM: Final = 2
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
            changes: The changed rows, as `encoded_change` returns them. Sorted ones are written sooner.

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


def encoded_change(key: Key, held: Held | None) -> RowPlace:
    """Return the change of a row as the index writes it.

    `held` is where the row is now, None if it was removed.
    """
    return _name(key), None if held is None else _VALUE.pack(*held)


def _name(key: Key) -> bytes:
    """Return the name of a row in the index: 128 bits of a hash, because keys are two to four times as long."""
    # No value has a NUL.
    return hashlib.blake2b("\0".join(key).encode(), digest_size=16).digest()


SHELF: Final = "shelf"


class KeyIndex:
    """The index of one view table. Not thread-safe, and only one object may have a folder open.

    If a use of the index does not end well, the next start makes the index again. Damage that LMDB does not
    notice can end the process (SIGBUS), and would do so at each start.

    Args:
        folder: The folder of the index on a local disk. It is created. Deleting it costs time and nothing else.
        path: The path or URI of the table.
        table: The name of the view table.
    """

    def __init__(self, folder: Path, path: str, table: str) -> None:
        self._folder = folder
        self._storage = table_storage(path)
        self._columns = [*key_columns(table), SHELF, "last_offset"]
        self._in_use = folder / "in_use"
        self._store: IndexStore | None = None
        self._at: IndexPosition | None = None

    def close(self) -> None:
        """Close the files. The next use opens them again."""
        if self._store is not None:
            self._store.close()
        self._store = self._at = None

    def held(self, delta: DeltaTable, keys: Iterable[Key]) -> dict[Key, Held]:
        """Return the shelf and the offset of each row that has one of these keys. Other keys are left out.

        Args:
            delta: The table, at the version to look at.
            keys: The keys, once or more often.
        """
        wanted = list(keys)
        if not wanted:
            return {}
        self.bring_to(delta)
        try:
            return self._read(wanted)
        except StoreDamaged:
            self._discard()
            self.bring_to(delta)
            return self._read(wanted)

    def advance(self, delta: DeltaTable, changes: Mapping[Key, Held | None]) -> None:
        """Add the changes of the commit that made the table's version.

        If there are other commits since the index's version, the changes are taken from the files instead.

        Args:
            delta: The table after the commit.
            changes: For the key of each changed row, the group of files that has the row now, and the offset
                of the record that changed it. None: the row was removed.
        """
        at = self._at
        if at is not None and self._is_at(delta.version() - 1):
            after = self._position(delta)
            try:
                with self._used() as store:
                    store.advance(at, after, sorted(map(encoded_change, changes.keys(), changes.values())))
                self._at = after
            except StoreDamaged:
                self._discard()
        self.bring_to(delta)

    def bring_to(self, delta: DeltaTable) -> None:
        """Bring the index to the table's version, if it is elsewhere.

        Raises:
            lmdb.Error: The index cannot be written, for example because the disk is full.
            StoreMoved: Another process changes the index at the same time.
        """
        if self._is_at(delta.version()):
            return
        wanted = self._position(delta)
        try:
            with self._used() as store:
                found = store.position()
            is_there = found == wanted and wanted.digest != ""
            if not is_there and not self._follow(delta, found, wanted):
                self._load(delta, wanted)
        except StoreDamaged:
            self._load(delta, wanted)
        self._at = wanted

    def _is_at(self, version: int) -> bool:
        """Return whether the index is open, whole, and at a version of the table."""
        is_open = self._store is not None and self._store.is_whole()
        return is_open and self._at is not None and self._at.version == version

    def _read(self, keys: list[Key]) -> dict[Key, Held]:
        with self._used() as store:
            return store.held(keys)

    def _load(self, delta: DeltaTable, wanted: IndexPosition) -> None:
        """Make the index again from the keys of all rows."""
        # LMDB's file does not shrink, so it is not used again.
        self._discard()
        with self._used() as store:
            store.advance(None, wanted, self._changes(dataset_of(delta)))
        # LMDB keeps the memory of a large transaction until the file is closed.
        self.close()

    def _follow(self, delta: DeltaTable, found: IndexPosition | None, wanted: IndexPosition) -> bool:
        """Bring the index forward from the position that it has, and return whether that was possible."""
        if found is None or not found.digest or found.version > wanted.version:
            return False
        if found != self._position(delta, found.version):
            return False
        try:
            with self._used() as store:
                store.advance(found, wanted, self._changes_since(delta, found.version))
        except (OSError, DeltaError, pa.ArrowException):
            # Maintenance has deleted commits or files that are needed.
            return False
        return True

    def _changes_since(self, delta: DeltaTable, version: int) -> Iterator[RowPlace]:
        """Yield the changes since a version, by the files that only one of the two versions has.

        Raises:
            OSError: A file or commit was deleted.
            DeltaError: The version can no longer be read.
        """
        # Most commits of maintenance move no row to another shelf.
        if any(map(_changes_rows, map(self._commit, range(version + 1, delta.version() + 1)))):
            old, new = dataset_of(DeltaTable(delta.table_uri, version=version)), dataset_of(delta)
            old_files, new_files = ({one.path for one in files.get_fragments()} for files in (old, new))
            for name, _ in self._changes(old, old_files - new_files):
                yield name, None
            yield from self._changes(new, new_files - old_files)

    def _changes(self, rows: TableRows, files: set[str] | None = None) -> Iterator[RowPlace]:
        """Yield the place of each row, in all files or in some files of a table."""
        for fragment in rows.get_fragments():
            if files is None or fragment.path in files:
                for batch in fragment.to_batches(schema=rows.schema, columns=self._columns):
                    cells = (batch.column(name).to_pylist() for name in self._columns)
                    # In order, because neighbours in the store are then written one after the other.
                    yield from sorted(
                        encoded_change(row[:-2], Held(*row[-2:])) for row in zip(*cells, strict=True)
                    )

    def _position(self, delta: DeltaTable, version: int | None = None) -> IndexPosition:
        """Return the position of an index of this version of the table. None: the version that is loaded."""
        at = delta.version() if version is None else version
        try:
            digest = hashlib.sha256(self._commit(at)).hexdigest()
        except FileNotFoundError:
            digest = ""
        return IndexPosition(str(delta.metadata().id), _FORM, at, digest)

    def _commit(self, version: int) -> bytes:
        """Return the text of the commit that made a version. Raises FileNotFoundError if it was deleted."""
        with self._storage.open_input_stream(f"_delta_log/{version:020}.json") as stream:
            return bytes(stream.read())

    @contextmanager
    def _used(self) -> Iterator[IndexStore]:
        """Open the store if needed. A file says that it is in use, until the block ends without an error."""
        if self._store is None or not self._store.is_whole():
            self.close()
            if self._in_use.exists():
                self._discard()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._in_use.touch()
        if self._store is None:
            self._store = IndexStore(self._folder)
        yield self._store
        self._in_use.unlink(missing_ok=True)

    def _discard(self) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _changes_rows(commit: bytes) -> bool:
    """Return whether a commit of a Delta table changes rows or moves them to another shelf."""
    actions = [action for line in commit.splitlines() for action in orjson.loads(line).items()]
    return any(name in ("add", "remove") and body["dataChange"] for name, body in actions)
