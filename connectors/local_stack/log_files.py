"""The parts' logs: bounded in size, read from their end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

LIMIT_BYTES = 16 * 1024 * 1024
_BLOCK = 64 * 1024


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, without reading all of it."""
    try:
        with path.open("rb") as log:
            position = log.seek(0, os.SEEK_END)
            data = b""
            while position > 0 and data.count(b"\n") <= count:
                step = min(_BLOCK, position)
                position = log.seek(position - step)
                data = log.read(step) + data
    except OSError:
        return []
    return data.decode("utf-8", errors="replace").splitlines()[-count:] if count > 0 else []


def keep_bounded(path: Path, limit_bytes: int = LIMIT_BYTES) -> bool:
    """Move a log that has grown too large to `<name>.1` and empty it. Returns whether it did.

    The writer has it open for appending, so the file stays and is cut: what it writes in between is lost.
    """
    try:
        if path.stat().st_size <= limit_bytes:
            return False
    except OSError:
        return False
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)
    return True
