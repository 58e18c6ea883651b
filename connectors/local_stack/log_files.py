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
    Raises OSError when the disk does not take the copy; the log is left as it is then.
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
        # Half a copy is no use, and on a full disk it takes the last room.
        with suppress(OSError):
            copy.unlink(missing_ok=True)
        raise
    os.truncate(path, 0)
    return True


class DiskTrouble:
    """Lets one who looks after others go on when the disk fails it, as when it is full. Trouble is told once.

    with trouble.tolerated("the state file"):
        write_state(settings, state)
    """

    def __init__(self, retry_s: float = _RETRY_S) -> None:
        self._retry_s = retry_s
        self._told: dict[str, float] = {}

    def is_due(self, what: str) -> bool:
        """Whether to try: not so soon after it has failed."""
        failed_at = self._told.get(what)
        return failed_at is None or time.monotonic() - failed_at >= self._retry_s

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Go on behind the block when it raises OSError."""
        try:
            yield
        except OSError as error:
            if what not in self._told:
                # The log that this goes to may lie on the same disk.
                with suppress(OSError):
                    print(f"{what}: {error}; going on without", flush=True)
            self._told[what] = time.monotonic()
        else:
            self._told.pop(what, None)
