"""Files that only their owner may read: check the mode of a private key, create a file once, replace a file."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schemas.settings.settings import SettingsError


def check_key_file(settings: str, certfile: Path, keyfile: Path | None) -> None:
    """Check that only the owner can read the file with the private key of a TLS certificate.

    A file that is missing, or whose mode cannot be read, passes: the code that opens it reports the error.

    Args:
        settings: the prefix of the setting's name in the error message, such as `gateway.` for
            `gateway.keyfile`.
        certfile: the file with the certificate.
        keyfile: the file with the private key. None means that it is in `certfile`, too.

    Raises:
        SettingsError: other users can read the file.
    """
    path, name = (certfile, "certfile") if keyfile is None else (keyfile, "keyfile")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o077:
        raise SettingsError(f"{settings}{name}: {path} is readable by others; run: chmod 600 {path}")


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
