"""Files that only their owner may read: check the mode of a private key, and replace a file atomically."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from schemas.settings.settings import SettingsError


def check_key_file(settings: str, certfile: Path, keyfile: Path | None) -> None:
    """Raise SettingsError when users other than the owner can read a private key.

    The key is in `keyfile`, or else in `certfile` together with the certificate. `settings` is the prefix of
    both names in the message, such as `gateway.` for `gateway.keyfile`. A file that cannot be examined passes:
    the code that opens it reports the error.
    """
    path, name = (certfile, "certfile") if keyfile is None else (keyfile, "keyfile")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o077:
        raise SettingsError(f"{settings}{name}: {path} is readable by others; run: chmod 600 {path}")


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file atomically, by default for its owner alone.

    A reader finds the old content or the new one, also after a power cut. The folder must exist. Raises
    OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        draft.unlink(missing_ok=True)
