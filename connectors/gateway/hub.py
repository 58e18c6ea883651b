"""What the gateway's handlers share: live view, appender, picker, indexes. One object for one process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Protocol

from connectors.gateway.identities import Identities
from connectors.gateway.log_appender import LogAppender
from connectors.gateway.pending_jobs import PendingJobs
from connectors.gateway.picking import FreshView, Picker
from connectors.gateway.refusals import RefusalRecorder
from connectors.live_view import LiveView
from schemas.sealing import Keyring
from schemas.settings import Settings
from schemas.settled import AppliedChange
from schemas.view_rows import REGISTRY_JOBS, REGISTRY_PRINCIPALS, JobRow


class Companion(Protocol):
    """A component that lives with the gateway and wants to know of its jobs, such as the broker's accounts."""

    def open(self) -> None:
        """Called once, when the live view has caught up."""

    def on_change(self, change: AppliedChange) -> None:
        """A row has changed; called on the live view's thread, must be quick."""

    def registered(self, job_id: str) -> None:
        """Called on a thread of its own before the registration of a job is answered."""

    def close(self) -> None:
        """The end."""


class Hub:
    """Opens and closes what the handlers need, in order."""

    def __init__(
        self,
        settings: Settings,
        keyring: Keyring,
        operator_token: str,
        live_view: LiveView,
        companions: Sequence[Companion] = (),
    ) -> None:
        self.settings = settings
        self.keyring = keyring
        self.live_view = live_view
        self.companions = tuple(companions)
        self.boot_id = uuid.uuid4().hex[:12]
        self.identities = Identities(operator_token)
        self.pending = PendingJobs(self.job_row)
        self.appender = LogAppender(settings, live_view)
        self.refusals = RefusalRecorder(self.appender.append_unattended)
        self.fresh = FreshView(live_view, settings.gateway.settle_timeout_s)
        self.picker = Picker(
            live_view, self.pending, self.appender, self.fresh, settings.gateway.settle_timeout_s
        )
        self.stopping = asyncio.Event()

    def open(self) -> None:
        """Load the view, make the publisher, tell the companions. Raises TrunklineError."""
        watchers = [self.identities.changed, self.pending.changed, *(c.on_change for c in self.companions)]
        for watcher in watchers:
            self.live_view.on_change(watcher)
        self.live_view.open()
        self.identities.load(self.live_view.rows(REGISTRY_PRINCIPALS))
        self.pending.load(self.live_view.rows(REGISTRY_JOBS))
        self.appender.open()
        for companion in self.companions:
            companion.open()

    def close(self) -> None:
        """End all of it; what was appended is waited for."""
        for companion in self.companions:
            companion.close()
        self.appender.close()
        self.live_view.close()

    def job_row(self, job_id: str) -> JobRow | None:
        """The row of a job, None for an unknown one."""
        row = self.live_view.row(REGISTRY_JOBS, job_id)
        return row if isinstance(row, JobRow) else None

    async def tell_registered(self, job_id: str) -> None:
        """Let the companions do what must be done before a job's registration is answered."""
        for companion in self.companions:
            await asyncio.to_thread(companion.registered, job_id)
