"""Files that hold a private key: used only while nobody but their owner can read them."""

from __future__ import annotations

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
