"""The bases of the gateway's background services, which follow its live view, and of programs beside it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from connectors.plumbing.machine.json_log import configure_json_log
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.settings.settings import Settings, SettingsError, load_settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.private_files import keep_files_private

log = structlog.stdlib.get_logger(__name__)


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


def run_program(name: str, run: Callable[[Settings, threading.Event, Path | None], None]) -> int:
    """Run a program of the stack until SIGTERM or SIGINT, and return the exit code of its process.

    The code is 0 after a signal, 2 for wrong settings, and 1 for files that cannot be used. For a
    TrunklineError, which is logged, it is the error's own. The files of the program are private.

    Args:
        name: The name of the program in its log.
        run: Runs the program with the settings until the event is set. The path, from the variable
            TRUNKLINE_READY_FILE, is that of a file to create when the program is ready; None: there is none.
    """
    keep_files_private()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = load_settings()
    except SettingsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    password = settings.mqtt.password
    configure_json_log(name, [password.get_secret_value()] if password else [])
    ready = os.environ.get("TRUNKLINE_READY_FILE")
    try:
        run(settings, stop, Path(ready) if ready else None)
    except (TrunklineError, SettingsError, OSError) as error:
        log.error("refused_to_start", program=name, error=str(error))
        if isinstance(error, TrunklineError):
            return error.exit_code
        return 2 if isinstance(error, SettingsError) else 1
    return 0
