"""The interface and the base class of the gateway's background services, which follow its live view."""

from __future__ import annotations

import threading
from typing import Protocol

from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row


class BackgroundService(Protocol):
    """A component that lives as long as the gateway, such as the manager of the MQTT broker's accounts."""

    @property
    def follows(self) -> tuple[type[Row], ...]:
        """The types of the rows that `on_change` is called for."""

    def open(self) -> None:
        """Start the service. The gateway calls this once, when its live view has caught up with the log."""

    def on_change(self, change: AppliedChange) -> None:
        """Handle a changed row of a type that the service follows.

        The live view calls it, and waits for it, so the method must return quickly.
        """

    def registered(self, job_id: str) -> None:
        """Prepare for the new job `job_id`, for example by waiting for its account at the MQTT broker.

        The gateway calls this on a worker thread before it answers the registration of a job, so the method may
        block. The gateway also calls it when an agent is registered for MQTT. Then `job_id` is the agent's MQTT
        user name.
        """

    def pause(self, owner: str, seconds: float) -> None:
        """Let an account at the MQTT broker publish nothing for so many seconds. Must not block.

        `owner` is a job's id, or the MQTT user name of an agent. The gateway calls this on its event loop.
        """

    def close(self) -> None:
        """Stop the service. The gateway calls this once, when it ends."""


class ThreadedService:
    """A base class for a background service with one thread.

    The thread runs the subclass's `_run`, which must return soon after the event `_closing` is set.

    Args:
        name: The thread's name.
        close_s: `close` waits at most this many seconds for the thread.
    """

    follows: tuple[type[Row], ...] = ()

    def __init__(self, name: str, close_s: float = 10.0) -> None:
        self._closing = threading.Event()
        self._close_s = close_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self) -> None:
        """Start the thread and return at once."""
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end, and wait for it at most `close_s` seconds. It may be called before `open`."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(self._close_s)

    def on_change(self, change: AppliedChange) -> None:
        """Ignore the change. A service that follows rows of views overrides this."""

    def registered(self, job_id: str) -> None:
        """Do nothing. No service with this base class prepares for new jobs."""

    def pause(self, owner: str, seconds: float) -> None:
        """Do nothing. No service with this base class keeps accounts."""

    def _run(self) -> None:
        raise NotImplementedError
