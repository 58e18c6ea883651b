"""The program of a pump process: `python -m connectors.doors.xml_pump`.

Any number may run, on any machine that reaches a gateway, each under a name of its own. After SIGTERM or SIGINT
it leases nothing more and waits for its handlers. Messages whose handlers do not end in time are given back.

When a pump starts, the gateway gives back the messages that an earlier pump of the same name held. So no two
running pumps may have one name. Each locks a file below the data directory, the first that is free. The name is
in the file, so the next process that locks it has the same name.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import structlog

from connectors.doors.xml_pump.dispatcher import Dispatcher, limit_in
from connectors.doors.xml_pump.gateway_link import GatewayLink
from connectors.doors.xml_pump.listener_table import TableMaker
from connectors.doors.xml_pump.pump import Pump
from connectors.doors.xml_pump.settling import Settler
from connectors.plumbing.xml_wire.documents import XmlLimits
from schemas.settings.settings import Settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import is_name

log = structlog.stdlib.get_logger("connectors.doors.xml_pump")  # __name__ may be __main__

SCHEMAS_FOLDER: Final = "listener_schemas"
NAMES_FOLDER: Final = "xml_pump"
_PUMPS_MOST: Final = 1000
# Space in a request for all fields besides the outcomes.
_REQUEST_MARGIN: Final = 2048
_OWN_LIMIT_S: Final = 30.0
_STRAY_S: Final = 1.0
EXIT_BLOCKED: Final = 70
_BEAT_S: Final = 0.25
_LOOK_S: Final = 0.25
# On a machine under load the loop runs late, through no fault of a handler.
MARGIN_S: Final = 1.0


class LoopWatchdog(threading.Thread):
    """A thread that ends the process when a handler blocks the event loop, and so all other handlers.

    Create it in the event loop's thread. The messages in progress go back to their mailboxes when the next
    process starts. A message whose handler does this three times is dead (XP-13). The watchdog cannot see code
    that holds Python's global interpreter lock while it blocks, as a C extension may.

    Args:
        limit_of: Called in the watchdog's thread with the asyncio task that runs now. It returns how long that
            task may keep the loop, in seconds, and the name of its listener.
        end: Ends the process with the given exit code.
        margin_s: A further time in seconds, for machines under load.
    """

    def __init__(
        self,
        limit_of: Callable[[asyncio.Task[object] | None], tuple[float, str]],
        end: Callable[[int], object] = os._exit,
        margin_s: float = MARGIN_S,
    ) -> None:
        super().__init__(name="loop-watchdog", daemon=True)
        self._margin_s = margin_s
        self._limit_of = limit_of
        self._end = end
        self._stopping = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._beat()

    def stop(self) -> None:
        """Stop watching. The thread ends within a quarter of a second."""
        self._stopping.set()
        self._timer.cancel()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def run(self) -> None:
        """Watch the loop until `stop` is called, or end the process when the loop is blocked for too long.

        Do not call it: the thread runs it after `start`.
        """
        looked_at = time.monotonic()
        while not self._stopping.wait(_LOOK_S):
            now = time.monotonic()
            was_held, looked_at = now - looked_at > 4 * _LOOK_S, now
            if was_held:
                # The whole process was stopped, as by SIGSTOP. Let the loop run first.
                self._beat_at = now
                continue
            held_s = now - self._beat_at
            if held_s <= self._margin_s:
                continue
            limit_s, whose = self._limit_of(asyncio.current_task(self._loop))
            if held_s > limit_s + self._margin_s + _BEAT_S:
                log.error("event_loop_blocked", listener=whose, blocked_s=round(held_s, 1), limit_s=limit_s)
                self._end(EXIT_BLOCKED)
                return


def take_name(folder: Path) -> tuple[str, IO[bytes]]:
    """Reserve a name that no other running pump has, in a file of `folder`. Does not wait.

    The name of an ended pump is reused, so that the gateway gives that pump's messages back at the start. The
    folder is created if it is missing.

    Returns:
        The name, and the open and locked file with it. The name is reserved until the file is closed.

    Raises:
        OSError: A file in the folder cannot be used.
        TrunklineError: A thousand pumps run already.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(1, _PUMPS_MOST + 1):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.fdopen(os.open(folder / f"{number}.name", flags, 0o600), "r+b", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        name = lock.read(200).decode("ascii", "replace").strip()
        if not is_name(name) or "." in name:
            # The random part distinguishes pumps of other machines, which have the same numbers.
            name = f"pump-{number}-{secrets.token_hex(4)}"
            lock.seek(0)
            lock.truncate()
            lock.write(name.encode("ascii"))
        return name, lock
    raise TrunklineError(f"{_PUMPS_MOST} pumps run already below {folder}")


def make_pump(settings: Settings, name: str) -> tuple[Pump, GatewayLink]:
    """Create a pump with the name `name`, and its connection to the gateway, which the caller closes.

    Makes no request; await `Pump.run` to start. Call it in the event loop that will run the pump. Raises
    UsageError if the settings' address of the gateway or the token cannot be used.
    """
    link = GatewayLink(settings)
    limits = XmlLimits(document_bytes=settings.limits.payload_bytes)
    request_bytes = settings.limits.payload_bytes - _REQUEST_MARGIN
    maker = TableMaker(settings.data_path / SCHEMAS_FOLDER, limits)

    def dispatcher(spent: Callable[[str, int], None]) -> Dispatcher:
        return Dispatcher(link, maker.system_pipeline, limits, request_bytes, spent)

    pump = Pump(
        name,
        link,
        maker,
        dispatcher,
        Settler(link, name, request_bytes),
        concurrency=settings.xml_pump.concurrency,
        share=1 / max(1, settings.xml_pump.processes),
    )
    return pump, link


async def run_pump(
    settings: Settings, name: str, was_stopped: threading.Event, ready_file: Path | None
) -> None:
    """Run a pump until SIGTERM or SIGINT, with a watchdog for blocked event loops.

    The watchdog ends the whole process when a handler blocks the event loop beyond its time limit. At the end,
    the process exits at once if a cancelled handler still runs.

    Args:
        settings: The settings of the pump and the gateway.
        name: The name of the pump, which no other running pump has.
        was_stopped: Whether a signal has come before the event loop handled them.
        ready_file: A file to create when the listeners are loaded; None for no such file.

    Raises:
        TrunklineError: The settings are unusable, or the gateway refuses the pump's requests.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if was_stopped.is_set():
        return
    loop.set_exception_handler(_task_failed)
    pump, link = make_pump(settings, name)

    def limit_of(task: asyncio.Task[object] | None) -> tuple[float, str]:
        """Return how many seconds an asyncio task may keep the event loop, and the name of its listener."""
        found = None if task is None else limit_in(task.get_name())
        if found is not None:
            return found
        # A task that a handler has created, or one of the pump.
        longest = max((message.timeout_ms / 1000 for message in pump.under_way), default=0.0)
        return max(longest, _OWN_LIMIT_S), "unknown"

    watchdog = LoopWatchdog(limit_of)
    watchdog.start()
    try:
        await pump.run(stop, (lambda: None) if ready_file is None else ready_file.touch)
    finally:
        await _end_strays()
        watchdog.stop()
        link.close()


def _task_failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log the type of an error in a handler's own task, without its text."""
    log.error("task_failed", error=type(context.get("exception")).__name__)


async def _end_strays() -> None:
    """End the process if handlers still run although they were cancelled, by now twice."""
    strays = {task for task in asyncio.all_tasks() if limit_in(task.get_name()) is not None}
    if strays:
        await asyncio.wait(strays, timeout=_STRAY_S)
    if any(not task.done() for task in strays):
        log.error("handler_ignores_cancel", tasks=len(strays))
        os._exit(0)


def run(settings: Settings, stop: threading.Event, ready_file: Path | None) -> None:
    """Run a pump under a name of its own until SIGTERM or SIGINT; see `run_pump`."""
    name, lock = take_name(settings.data_path / NAMES_FOLDER)
    with lock:
        asyncio.run(run_pump(settings, name, stop, ready_file))
    log.info("stopped", pump=name)
