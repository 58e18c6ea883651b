"""The file queue that the bridge reads and writes: its folder, its changes, and the locks of its sessions."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, Final

import structlog
import watchfiles

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


log = structlog.stdlib.get_logger(__name__)

# Changes within this time count as one, unless none follows within a step.
_DEBOUNCE_MS: Final = 20
_STEP_MS: Final = 10


class FolderWatch:
    """A watch of a folder and all below it, which notices changes also between two calls of `wait`.

    It watches from the first call of `wait` on, and anew if the folder was replaced. Not thread-safe.

    Args:
        root: The folder. While it does not exist, `wait` waits for the time alone.
        stop: Ends a wait when it is set.
        wait_s: How long `wait` waits at most.
        is_own: Returns whether a file of this name, without its folder, is written by the caller alone. Its
            changes end no wait.
    """

    def __init__(self, root: str, stop: threading.Event, wait_s: float, is_own: Callable[[str], bool]) -> None:
        self._root = root
        self._stop = stop
        self._wait_s = wait_s
        self._is_own = is_own
        self._folder: tuple[int, int] | None = None
        self._changes: Generator[Any, None, None] | None = None

    def wait(self) -> None:
        """Wait until something has changed since the last call, at most `wait_s` seconds."""
        folder = self._identity()
        if folder is None or folder != self._folder:
            self.close()
            self._folder = folder
        if folder is None:
            self._stop.wait(self._wait_s)
            return
        try:
            if self._changes is None:
                self._changes = self._watch()
            next(self._changes)
        except StopIteration:  # `stop` was set
            self._changes = None
        except (OSError, RuntimeError) as error:  # no watches left: look after the time alone
            log.debug("no_watch", why=str(error))
            self.close()
            self._stop.wait(self._wait_s)

    def close(self) -> None:
        """End the watch. A later call of `wait` begins a new one."""
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = Path(self._root).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _watch(self) -> Generator[Any, None, None]:
        return watchfiles.watch(
            self._root,
            stop_event=self._stop,
            watch_filter=lambda _, path: not self._is_own(PurePath(path).name),
            debounce=_DEBOUNCE_MS,
            step=_STEP_MS,
            rust_timeout=int(self._wait_s * 1000),
            yield_on_timeout=True,
            raise_interrupt=False,
        )
