"""Background threads of the streaming driver, and the exit codes of its programs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from schemas.errors import TrunklineError
from schemas.settings.settings import SettingsError


class BackgroundThread:
    """A daemon thread that runs `_run` until `stop`; `_run` ends soon after `_stopping` is set."""

    def __init__(self, name: str) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float | None = 10.0) -> None:
        """Stop the thread after its current work; wait at most `timeout_s` (None: without a limit)."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        raise NotImplementedError


def exit_code_of(program: str, action: Callable[[], int]) -> int:
    """Run a program, report its error on stderr, and return the exit code."""
    try:
        return action()
    except (SettingsError, TrunklineError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else error.exit_code
