"""Ends processes on this machine whose sessions are over in the registry: a background service of the gateway.

**Reads** the rows of `registry_sessions` that name this host. **Owns** nothing that lasts.
**Guarantees** that the processes of a stopped or terminated session are ended here within a few seconds
(`gateway.session_check_s`), also if the process manager closed the session because its job had ended. A session
that does not end delays no other: a check signals processes and never waits for them. Archived sessions are not
touched. **On restart** it checks the sessions that are not terminated, and those of which this machine has
files or processes; ending a session of which nothing runs does nothing. Later checks look only at sessions that
have stopped since and whose processes may still run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import psutil
import structlog

from connectors.plumbing.machine.background_service import ThreadedService
from connectors.plumbing.machine.process_tree import KILL_S
from connectors.programs.processes.session_host import GRACE_S, OWN_END_S, SessionHost
from schemas.fold.settled import AppliedChange
from schemas.fold.stream_kind import STOPPED
from schemas.settings.settings import Settings
from schemas.streams.session.sessions import TERMINATED, SessionRow
from trunkline_agent.errors import TrunklineError

log = structlog.stdlib.get_logger(__name__)

# A check takes well under a second. The stack gives the whole gateway 15 s to end.
_STOP_S: Final = 5.0


@dataclass
class _Ending:
    """The progress of ending one run. `asked_at` is the time of SIGTERM."""

    since: float
    asked_at: float | None = None
    is_reported: bool = False


class SessionKeeper(ThreadedService):
    """A background service that ends the processes of stopped and terminated sessions on this machine.

    It checks every `gateway.session_check_s` seconds in a thread of its own. Processes that still run when the
    gateway ends are left to the next gateway.

    Args:
        settings: the settings, for the data directory and the time between two checks.
        rows: returns the rows of all sessions that are not terminated and of the sessions with these names. It
            is called once, at the start.
        host: the sessions on this machine. None: those of the data directory.
        own_end_s: how long a session may take to end by itself before SIGTERM, in seconds.
        grace_s: how long it may take to end after SIGTERM before SIGKILL, in seconds.
    """

    follows = (SessionRow,)

    def __init__(
        self,
        settings: Settings,
        rows: Callable[[Collection[str]], Iterable[SessionRow]],
        host: SessionHost | None = None,
        *,
        own_end_s: float = OWN_END_S,
        grace_s: float = GRACE_S,
    ) -> None:
        super().__init__("session-keeper", _STOP_S)
        self._check_s = settings.gateway.session_check_s
        self._rows = rows
        self._host = host or SessionHost(settings)
        self._own_end_s = own_end_s
        self._grace_s = grace_s
        self._endings: dict[str, _Ending] = {}
        self._lock = threading.Lock()
        # By name: the sessions here that are over and whose processes may still run.
        self._over: dict[str, SessionRow] = {}

    def open(self) -> None:
        """Read sessions and start the thread. Call it once, when the live view is open."""
        self.load()
        super().open()

    def load(self) -> None:
        """Note each session that is over and may still run here, so that the next check looks at it."""
        names = {*self._host.kept(), *self._host.running().values()}
        # A change that comes meanwhile waits for the lock, and is newer than the rows.
        with self._lock:
            for row in self._rows(names):
                self._note(row)

    def on_change(self, change: AppliedChange) -> None:
        """Note a session that is over, or that runs again. The live view calls it on its own thread."""
        if isinstance(change.row, SessionRow):
            with self._lock:
                self._note(change.row)

    def _note(self, row: SessionRow) -> None:
        is_over = row.status in (STOPPED, TERMINATED) and row.host == self._host.name
        if is_over and row.handle is not None:
            self._over[row.session] = row
        else:
            self._over.pop(row.session, None)

    def check(self) -> list[str]:
        """Check all sessions once, and send signals to the processes of each session that is over.

        A session is over if its status in the registry is stopped or terminated. Its processes first get
        `own_end_s` seconds to end by themselves, then SIGTERM, and after `grace_s` more seconds SIGKILL. The
        call does not wait for processes; each call takes the step that is due.

        Returns:
            The names of sessions that this service has signalled and of which no process runs any more. Each is
            returned once.

        Raises:
            TrunklineError: tmux does not answer.
        """
        with self._lock:
            over = {row.handle: row for row in self._over.values() if row.handle is not None}
        # A session that was resumed under the same handle is not over any more.
        self._endings = {handle: ending for handle, ending in self._endings.items() if handle in over}
        left = self._host.left_of(over.keys()) if over else set()
        ended = []
        for handle, row in over.items():
            try:
                if handle in left:
                    self._go_on(handle, row)
                elif self._note_gone(handle, row):
                    ended.append(row.session)
            except (TrunklineError, OSError, psutil.Error) as error:
                log.warning("session_not_ended", session=row.session, error=str(error))
        return ended

    def _go_on(self, handle: str, row: SessionRow) -> None:
        """Wait, send SIGTERM or send SIGKILL, depending on the time since the session was over."""
        now = time.monotonic()
        ending = self._endings.setdefault(handle, _Ending(now))
        if ending.asked_at is None:
            if now - ending.since >= self._own_end_s:
                ending.asked_at = now
                self._host.send(handle, signal.SIGTERM)
            return
        over_s = now - ending.asked_at - self._grace_s
        if over_s < 0:
            return
        left = self._host.send(handle, signal.SIGKILL)
        if over_s > KILL_S and not ending.is_reported:
            ending.is_reported = True
            numbers = sorted(process.pid for process in left)
            log.warning("session_not_ended", session=row.session, error=f"processes {numbers} do not end")

    def _note_gone(self, handle: str, row: SessionRow) -> bool:
        """Note that nothing of a session runs any more. Return whether this service has ended it."""
        if row.status == TERMINATED:
            self._host.forget(row.session)
        with self._lock:
            if self._over.get(row.session) is row:
                del self._over[row.session]
        ending = self._endings.pop(handle, None)
        if ending is None or ending.asked_at is None:
            return False
        log.info("session_ended", session=row.session, status=row.status, why=row.reason)
        return True

    def _run(self) -> None:
        while not self._closing.wait(self._check_s):
            try:
                self.check()
            except TrunklineError as error:
                log.warning("session_check_failed", error=str(error))
            except Exception:
                log.exception("session_check_failed")
