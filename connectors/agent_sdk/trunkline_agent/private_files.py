"""Files that only their owner may read: create a file once, replace a file, check its mode."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def is_open_to_others(path: Path) -> bool:
    """Return whether other users may read, write or execute a file.

    The result is False if the file is missing or its mode cannot be read: the code that opens it reports the
    error.
    """
    try:
        return stat.S_IMODE(path.stat().st_mode) & 0o077 != 0
    except OSError:
        return False


def make_first(path: Path, text: str) -> None:
    """Create the file `path` (mode 0600) with the content `text`, synced to disk. Keep an existing file.

    If several programs call it at once, exactly one creates the file. No result says which. The caller
    therefore reads the file to get the valid content. A missing folder is created with mode 0700. Raises
    OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A link does not replace a file, so the first program's file stays.
    with _draft(path, text.encode("utf-8"), 0o600) as draft, suppress(FileExistsError):
        os.link(draft, path)


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to the file `path` atomically. By default only its owner can read the file.

    A reader finds the old content or the new one, also after a power cut. `mode` is the mode of the new file.
    Raises OSError, also if the folder does not exist.
    """
    with _draft(path, data, mode) as draft:
        draft.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _draft(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """Write `data` to a new file beside `path` and sync it. Delete it at the end, unless it was moved."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)
