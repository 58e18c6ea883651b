"""The parts' logs: bounded in size, read from their end."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT_BYTES = 16 * 1024 * 1024
_BLOCK = 64 * 1024
_RETRY_S = 30.0


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log without reading all of it."""
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
    """Copy a log that has grown too large to `<name>.1` and empty it. Return whether it did.

    The writer has the log open for appending, so the file stays and is cut. Lines that are written between the
    copy and the cut are lost. Raises OSError when the disk has no room for the copy; the log is unchanged then.
    """
    try:
        if path.stat().st_size <= limit_bytes:
            return False
    except OSError:
        return False
    copy = path.with_name(path.name + ".1")
    try:
        shutil.copyfile(path, copy)
    except OSError:
        # An incomplete copy is useless, and takes the last room on a full disk.
        with suppress(OSError):
            copy.unlink(missing_ok=True)
        raise
    os.truncate(path, 0)
    return True


class DiskTrouble:
    """Lets the supervisor go on when the disk is full or fails. Prints each problem once.

    with trouble.tolerated("the state file"):
        write_state(settings, state)
    """

    def __init__(self, retry_s: float = _RETRY_S) -> None:
        self._retry_s = retry_s
        self._failed_at: dict[str, float] = {}

    def is_due(self, what: str) -> bool:
        """Return whether to try this again: not too soon after a failure."""
        failed_at = self._failed_at.get(what)
        return failed_at is None or time.monotonic() - failed_at >= self._retry_s

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Continue after the block when it raises OSError."""
        try:
            yield
        except OSError as error:
            if what not in self._failed_at:
                # The log that this is printed to may be on the same disk.
                with suppress(OSError):
                    print(f"{what}: {error}; going on without", flush=True)
            self._failed_at[what] = time.monotonic()
        else:
            self._failed_at.pop(what, None)
