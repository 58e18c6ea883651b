"""Ends what the registry of sessions says is over and still runs on this machine: a companion of the gateway.

**Reads** the rows of `registry_sessions` that name this host. **Owns** nothing that lasts.
**Guarantees** that what runs under the handle of a stopped or terminated session is ended here within a few
seconds (`gateway.session_check_s`), also when the reactor closed the session because its job has ended.
Archived sessions are left alone. **On restart** it looks at all rows again; ending what is gone does nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from connectors.session_host import GRACE_S, OWN_END_S, SessionHost
from schemas.errors import TrunklineError
from schemas.life_cycles import STOPPED, TERMINATED
from schemas.settings import Settings
from schemas.settled import AppliedChange
from schemas.view_rows import SessionRow, ViewRow

log = structlog.stdlib.get_logger(__name__)

_STOP_S: Final = 2 * GRACE_S


class SessionKeeper:
    """`rows` gives the registry's sessions, such as `lambda: view.rows(REGISTRY_SESSIONS)`.

    What is over has `own_end_s` seconds to end by itself, before it is told to.
    """

    def __init__(
        self,
        settings: Settings,
        rows: Callable[[], Iterable[ViewRow]],
        host: SessionHost | None = None,
        *,
        own_end_s: float = OWN_END_S,
    ) -> None:
        self._check_s = settings.gateway.session_check_s
        self._rows = rows
        self._host = host or SessionHost(settings)
        self._own_end_s = own_end_s
        self._over_since: dict[str, float] = {}
        # A handle that is gone stays gone, so it is looked at once.
        self._gone: set[str] = set()
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
        """End; what is being ended is ended first."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def check(self) -> list[str]:
        """Look once; returns the sessions of which something was ended. Raises TrunklineError."""
        ended = []
        for row in list(self._rows()):
            if not isinstance(row, SessionRow) or row.handle is None or row.host != self._host.name:
                continue
            if row.status not in (STOPPED, TERMINATED) or row.handle in self._gone:
                continue
            since = self._over_since.setdefault(row.handle, time.monotonic())
            if time.monotonic() - since < self._own_end_s and self._host.alive(row.handle):
                continue
            if self._host.stop(row.handle, grace_s=GRACE_S):
                ended.append(row.session)
                log.info("session_ended", session=row.session, status=row.status, why=row.reason)
            if row.status == TERMINATED:
                self._host.forget(row.session)
            self._gone.add(row.handle)
            del self._over_since[row.handle]
        return ended

    def _run(self) -> None:
        while not self._closed.wait(self._check_s):
            try:
                self.check()
            except TrunklineError as error:
                log.warning("session_not_ended", error=str(error))
            except Exception:
                log.exception("session_check_failed")
