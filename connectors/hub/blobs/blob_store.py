"""The bytes of blobs: one object for each upload, in a local folder or an object store (DL-25).

**Delivers** an object as a whole or not at all: bytes are written to a file of their own, the *draft*, and
become an object when all are there. **Acknowledges when** they are on disk, or the object store has taken them.
**Loses** nothing after that; a draft that is not finished is deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from pyarrow.fs import FileSelector, FileType

from schemas.tables.delta_files import table_storage

_CHUNK_BYTES: Final = 1024 * 1024
# Below this name in a local folder, so that a draft becomes an object by renaming it.
_DRAFTS: Final = ".drafts"
# Other files in the folder are not ours.
_OBJECT: Final = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}").fullmatch
_DAMAGED_MOST: Final = 10_000


class BlobMissing(Exception):
    """The store has no object with this name, or one of another length."""


class Draft:
    """The bytes of an upload that has not ended, in a file. Not thread-safe. The methods may block."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b")

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes so far, in hex."""
        return self._hash.hexdigest()

    def write(self, part: bytes) -> None:
        """Append bytes. Raises OSError, for instance if the disk is full."""
        self._file.write(part)
        self._hash.update(part)
        self.size += len(part)

    def sync(self) -> None:
        """Write all bytes to the disk. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def parts(self) -> Iterator[bytes]:
        """Yield all bytes from the beginning, a MiB at a time."""
        self._file.flush()
        self._file.seek(0)
        while part := self._file.read(_CHUNK_BYTES):
            yield part

    def close(self) -> None:
        """Close the file, and delete it if it has not become an object. Further calls do nothing."""
        # A full disk does not take the last bytes, which nobody needs.
        with suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


class BlobStore:
    """The objects of all blobs. Thread-safe; each method may block.

    Args:
        root: A local folder or the URI of one in an object store, which is made when it is needed.
        drafts: A local folder for unfinished uploads. A local `root` has its own.
    """

    def __init__(self, root: str, drafts: Path) -> None:
        self.root = root
        self._folder = None if "://" in root else Path(root)
        self._drafts = drafts if self._folder is None else self._folder / _DRAFTS
        self._damaged: dict[str, None] = {}
        self._storage = None if self._folder is not None else table_storage(root)

    def new_draft(self) -> Draft:
        """Return a new draft, whose owner must call `Draft.close`. Raises OSError."""
        return Draft(self._drafts / uuid.uuid4().hex)

    def keep(self, draft: Draft) -> str:
        """Make a new object of a draft, durably, and return its name. If OSError is raised, there is none."""
        name = f"{draft.digest}.{uuid.uuid4().hex[:16]}"
        draft.sync()
        if self._folder is not None:
            draft.path.rename(self._folder / name)
            for folder in (self._folder, self._folder.parent):
                _sync_folder(folder)
            return name
        with self._remote().open_output_stream(name) as stream:
            for part in draft.parts():
                stream.write(part)
        if self.size(name) != draft.size:
            raise OSError(f"the object store has another length for the object {name}")
        return name

    def size(self, name: str) -> int | None:
        """Return the length of an object in bytes, or None without this object. Raises OSError."""
        if self._folder is not None:
            try:
                return (self._folder / name).stat().st_size
            except FileNotFoundError:
                return None
        found = self._remote().get_file_info(name)
        return found.size if found.type == FileType.File else None

    def open(self, name: str, size: int) -> IO[bytes]:
        """Open an object for reading. The caller closes it.

        Raises:
            BlobMissing: There is no such object, or it does not have `size` bytes.
            OSError: The store does not answer.
        """
        found = self.size(name)
        if found != size:
            raise BlobMissing(name)
        try:
            if self._folder is not None:
                return (self._folder / name).open("rb")
            stream: IO[bytes] = self._remote().open_input_file(name)
        except FileNotFoundError:
            raise BlobMissing(name) from None
        return stream

    def note_damaged(self, name: str) -> None:
        """Remember that an object does not have the content of its digest, so that no upload reuses it."""
        self._damaged[name] = None
        if len(self._damaged) > _DAMAGED_MOST:
            self._damaged.pop(next(iter(self._damaged)), None)

    def is_whole(self, name: str, size: int) -> bool:
        """Return whether an object has this length, and no reader has found it damaged. Raises OSError."""
        return name not in self._damaged and self.size(name) == size

    def delete(self, name: str) -> None:
        """Delete an object. Nothing happens without this object. Raises OSError."""
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)
        elif self.size(name) is not None:
            self._remote().delete_file(name)

    def strangers(self, age_s: float, is_known: Callable[[str], bool]) -> list[str]:
        """Return the names of the objects that were made more than `age_s` seconds ago and are not known.

        `is_known` returns whether an object of this name is known. Files that are no objects are left out.
        Raises OSError.
        """
        limit = time.time() - age_s

        def is_strange(name: str) -> bool:
            return _OBJECT(name) is not None and not is_known(name)

        if self._folder is not None:
            return [path.name for path in _files_before(self._folder, limit) if is_strange(path.name)]
        selector = FileSelector("", allow_not_found=True, recursive=False)
        names = [one.path for one in self._remote().get_file_info(selector) if one.type == FileType.File]
        # A listing of deltalake has no times.
        found = (self._remote().get_file_info(name) for name in names if is_strange(name))
        return [one.path for one in found if one.mtime is not None and one.mtime.timestamp() < limit]

    def delete_drafts(self, age_s: float) -> int:
        """Delete the drafts that a killed process left more than `age_s` seconds ago; return their number."""
        found = list(_files_before(self._drafts, time.time() - age_s))
        for path in found:
            path.unlink(missing_ok=True)
        return len(found)

    def _remote(self) -> Any:
        return self._storage


def _files_before(folder: Path, limit: float) -> Iterator[Path]:
    """Yield the files of a folder that were last changed before `limit`, in seconds since 1970 UTC."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < limit:
                    yield Path(entry.path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
