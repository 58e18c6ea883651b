"""A session's lock, taken without waiting for long: whoever holds it (an expire of a large file, a program that
was stopped) must not keep the other sessions waiting.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import Final

from connectors.file_queue.message_queue import lock_session
from connectors.file_queue.queue_errors import QueueError
from connectors.file_queue.session_files import LOCK, SessionFolder

_TICK_S: Final = 0.01


def lock_soon(folder: SessionFolder, wait_s: float) -> None:
    """Take the lock and finish a killed expire. Raises QueueError when it is not free within `wait_s`."""
    wait_free(folder, wait_s)
    # Taken in between, it is given back soon by whoever works.
    lock_session(folder)


def wait_free(folder: SessionFolder, wait_s: float) -> None:
    """Return when nobody holds the lock. Raises QueueError when that is not within `wait_s`."""
    deadline = time.monotonic() + wait_s
    while not _is_free(folder):
        if time.monotonic() > deadline:
            raise QueueError("somebody holds its lock")
        time.sleep(_TICK_S)


def _is_free(folder: SessionFolder) -> bool:
    try:
        fd = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder.fd)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
