"""Waits until a file of the queue changes, so that a new line is carried at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from pathlib import Path, PurePath
from typing import Any, Final

import structlog
import watchfiles

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
