"""Background services of the gateway: components that live as long as it does and follow its live view."""

from __future__ import annotations

import threading
from typing import Protocol

from schemas.fold.settled import AppliedChange


class BackgroundService(Protocol):
    """A component that the gateway opens and closes, such as the accounts at the MQTT broker."""

    def open(self) -> None:
        """Start. The gateway calls this once, when the live view has caught up."""

    def on_change(self, change: AppliedChange) -> None:
        """Take note of a changed row. The live view calls this on its own thread, so it must be quick."""

    def registered(self, job_id: str) -> None:
        """Prepare for a job before its registration is answered. It may block."""

    def close(self) -> None:
        """Stop."""


class ThreadedService:
    """A background service with one thread, which runs `_run` until `_closing` is set."""

    def __init__(self, name: str, close_s: float = 10.0) -> None:
        self._closing = threading.Event()
        self._close_s = close_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end and wait for it."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(self._close_s)

    def on_change(self, change: AppliedChange) -> None:
        """Ignore the change. A service that follows rows overrides this."""

    def registered(self, job_id: str) -> None:
        """Ignore the job. No service with this base class prepares for jobs."""

    def _run(self) -> None:
        raise NotImplementedError
