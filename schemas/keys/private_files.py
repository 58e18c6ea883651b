"""Files for their owner alone: check the mode of a private key, and write a private file in one step."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from schemas.settings.settings import SettingsError


def check_key_file(settings: str, certfile: Path, keyfile: Path | None) -> None:
    """Raise SettingsError when others than its owner can read the key: `keyfile`, else `certfile` with both.

    `settings`: what the names of the two begin with, `gateway.` for `gateway.keyfile`. A file that cannot
    be looked at is left to whoever opens it, who says why.
    """
    path, name = (certfile, "certfile") if keyfile is None else (keyfile, "keyfile")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o077:
        raise SettingsError(f"{settings}{name}: {path} is readable by others; run: chmod 600 {path}")


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file in one step, for its owner alone.

    A reader finds the old content or the new one, also after a power cut. The folder must exist.
    Raises OSError.
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
