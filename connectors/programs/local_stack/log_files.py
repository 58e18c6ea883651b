"""Limits the size of the parts' log files, reads their last lines, and tolerates failures of the disk."""

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
    """Return the last `count` lines of a log file without reading all of it. Empty if it cannot be read."""
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
    """Copy a log that has grown too large to `<name>.1` and empty it. Return whether this call did so.

    An older `<name>.1` is replaced. The program that writes the log keeps it open, so the file stays and is
    cut. Lines that are written between the copy and the cut are lost.

    Args:
        path: The log file. If it is missing, the result is False.
        limit_bytes: A log of at most this size is not changed, and the result is False.

    Raises:
        OSError: The disk has no room for the copy. The log is unchanged then.
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
    """A guard around writes to the disk, so that the supervisor goes on when the disk is full or fails.

        with trouble.tolerated("the state file"):
            write_state(settings, state)

    Args:
        retry_s: How long `is_due` returns False after a failure, in seconds.
    """

    def __init__(self, retry_s: float = _RETRY_S) -> None:
        self._retry_s = retry_s
        self._failed_at: dict[str, float] = {}

    def is_due(self, what: str) -> bool:
        """Return whether to try a write now. After a failure it is False for `retry_s` seconds.

        `what` is the name of the write that was given to `tolerated`.
        """
        failed_at = self._failed_at.get(what)
        return failed_at is None or time.monotonic() - failed_at >= self._retry_s

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Run the `with` block, and continue after it if it raises OSError.

        The error is printed to stdout. Further errors of blocks with the same `what` are not printed until one
        of these blocks has succeeded.

        Args:
            what: A name of the write, for the message and for `is_due`.
        """
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
