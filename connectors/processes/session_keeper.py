"""Ends what the registry of sessions says is over and still runs on this machine: a companion of the gateway.

**Reads** the rows of `registry_sessions` that name this host. **Owns** nothing that lasts.
**Guarantees** that what runs under the handle of a stopped or terminated session is ended here within a few
seconds (`gateway.session_check_s`), also when the reactor closed the session because its job has ended, and
that one which does not end holds up no other: a look asks and kills, it never waits. Archived sessions are left
alone. **On restart** it looks at all rows again; ending what is gone does nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import psutil
import structlog

from connectors.processes.session_host import GRACE_S, KILL_S, OWN_END_S, SessionHost
from schemas.errors import TrunklineError
from schemas.fold.life_cycles import STOPPED, TERMINATED
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row, SessionRow
from schemas.settings.settings import Settings

log = structlog.stdlib.get_logger(__name__)

# A look takes well under a second. The stack gives the whole gateway 15 s to end.
_STOP_S: Final = 5.0


@dataclass
class _Ending:
    """How far the end of one run is."""

    since: float
    asked_at: float | None = None
    is_told: bool = False


class SessionKeeper:
    """`rows` gives the registry's sessions, such as `lambda: view.rows(REGISTRY_SESSIONS)`.

    What is over has `own_end_s` seconds to end by itself before it is told to, then `grace_s` before it is
    killed.
    """

    def __init__(
        self,
        settings: Settings,
        rows: Callable[[], Iterable[Row]],
        host: SessionHost | None = None,
        *,
        own_end_s: float = OWN_END_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._check_s = settings.gateway.session_check_s
        self._rows = rows
        self._host = host or SessionHost(settings)
        self._own_end_s = own_end_s
        self._grace_s = grace_s
        self._endings: dict[str, _Ending] = {}
        # A handle that is gone stays gone, so it is looked at once in each state.
        self._gone: set[tuple[str, str]] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="session-keeper", daemon=True)

    def open(self) -> None:
        """Begin to look."""
        self._thread.start()

    def on_change(self, change: AppliedChange) -> None:
        """A row has changed: nothing to do, the next look will see it."""

    def registered(self, job_id: str) -> None:
        """A job was registered: nothing to do."""

    def close(self) -> None:
        """End. What was asked to end and has not is left to the next gateway."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def check(self) -> list[str]:
        """Look once, and go one step on with each session that is over; returns those of which something was
        ended and nothing is left. Raises TrunklineError when tmux does not answer.
        """
        over = {row.handle: row for row in self._over_here() if row.handle is not None}
        # One that was resumed under the same handle is over no more.
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

    def _over_here(self) -> list[SessionRow]:
        return [
            row
            for row in list(self._rows())
            if isinstance(row, SessionRow)
            and row.host == self._host.name
            and row.status in (STOPPED, TERMINATED)
            and row.handle is not None
            and (row.handle, row.status) not in self._gone
        ]

    def _go_on(self, handle: str, row: SessionRow) -> None:
        """Wait, ask or kill, as it is time for."""
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
        if over_s > KILL_S and not ending.is_told:
            ending.is_told = True
            numbers = sorted(process.pid for process in left)
            log.warning("session_not_ended", session=row.session, error=f"processes {numbers} do not end")

    def _note_gone(self, handle: str, row: SessionRow) -> bool:
        """Nothing of it is left; returns whether that is our doing."""
        if row.status == TERMINATED:
            self._host.forget(row.session)
        self._gone.add((handle, row.status))
        ending = self._endings.pop(handle, None)
        if ending is None or ending.asked_at is None:
            return False
        log.info("session_ended", session=row.session, status=row.status, why=row.reason)
        return True

    def _run(self) -> None:
        while not self._closed.wait(self._check_s):
            try:
                self.check()
            except TrunklineError as error:
                log.warning("session_check_failed", error=str(error))
            except Exception:
                log.exception("session_check_failed")
