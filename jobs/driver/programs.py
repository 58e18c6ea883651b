"""Parts that several programs of the jobs use: background threads, the lock of the views, and exit codes."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from schemas.settings.settings import Settings, SettingsError
from trunkline_agent.errors import Refused, TrunklineError


class BackgroundThread:
    """A daemon thread that runs a subclass's `_run` from `start` until `stop`.

    `_run` must return soon after the event `_stopping` is set. A thread cannot be started twice.
    """

    def __init__(self, name: str) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread and return at once."""
        self._thread.start()

    def stop(self, timeout_s: float | None = 10.0) -> None:
        """Ask the thread to end after its current work, and wait until it has ended.

        It may be called before `start` and more than once.

        Args:
            timeout_s: Wait at most this many seconds, then return although the thread still runs. None: no
                limit.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        raise NotImplementedError


def exit_code_of(program: str, action: Callable[[], int]) -> int:
    """Run `action`, the body of a program, and return the program's exit code.

    The code is the value that `action` returns. If `action` raises SettingsError (code 2) or another
    TrunklineError (its `exit_code`), the error is printed to stderr. Other exceptions are not caught.

    Args:
        program: The name at the beginning of the error message.
        action: The body of the program.
    """
    try:
        return action()
    except (SettingsError, TrunklineError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else error.exit_code


@contextmanager
def views_lock(settings: Settings) -> Iterator[None]:
    """Hold the lock of the view tables in a `with` block.

    The lock is on the file `run/views.lock` of the data directory. The kernel releases it if the process dies.

    Raises:
        Refused: Another process holds the lock. The message has its pid. The function does not wait.
    """
    path = settings.data_path / "run" / "views.lock"  # with the pid of its last holder
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise Refused(
                f"process {holder} is writing the view tables; stop it first (./trunkline down)"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
