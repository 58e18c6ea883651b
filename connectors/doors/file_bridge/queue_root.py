"""The file queue that the bridge reads and writes: its folder, and the locks of its sessions."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from schemas.settings.settings import Settings
from trunkline_agent.queue.queue_errors import QueueError
from trunkline_agent.queue.queue_settings import find_root
from trunkline_agent.queue.session_files import LOCK, SessionFolder, open_fd
from trunkline_agent.queue.session_lock import lock_session

_TICK_S: Final = 0.01


def queue_root(settings: Settings) -> Path:
    """Return the folder of the file queue that the bridge serves.

    This is the setting `files.root`. Without the setting, a stack with the default data directory serves the
    queue that `trunkline queue` uses for this user. A stack with another data directory, such as a test's, has
    its own queue there, and so has a stack whose user has no home folder in which the queue can be.
    """
    if settings.files.root is not None:
        return settings.files.root
    if settings.data_dir == Settings.model_fields["data_dir"].default:
        with suppress(QueueError):
            root = Path(find_root(os.environ)).absolute()
            present = next(folder for folder in (root, *root.parents) if folder.exists())
            if os.access(present, os.W_OK | os.X_OK):
                return root
    return settings.data_path / "queue"


def lock_soon(folder: SessionFolder, wait_s: float) -> None:
    """Take the lock of a session, and finish or undo the work of a `Queue.expire` that was killed.

    `SessionFolder.unlock` releases the lock. Raises QueueError if the lock is not free within `wait_s` seconds.
    Another program may have the lock for long, such as to remove messages from a large file. The bridge then
    serves the other sessions first.
    """
    wait_free(folder, wait_s)
    # A program that takes the lock in between is running, and releases it soon.
    lock_session(folder)


def wait_free(folder: SessionFolder, wait_s: float) -> None:
    """Wait until no process has a session's lock, without taking the lock.

    Raises QueueError if the lock is not free within `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while not _is_free(folder):
        if time.monotonic() > deadline:
            raise QueueError("another process holds its lock")
        time.sleep(_TICK_S)


def _is_free(folder: SessionFolder) -> bool:
    try:
        with open_fd(LOCK, os.O_RDWR | os.O_NONBLOCK, folder.fd) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True
