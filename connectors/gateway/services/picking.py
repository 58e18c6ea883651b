"""Picking jobs (JE-11): a session gets the oldest pending job that fits; the order of the log decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from connectors.gateway.services.log_appender import LogAppender
from connectors.gateway.services.pending_jobs import PendingJobs
from connectors.gateway.web.answers import BUSY, NO_MATCH, ApiError, refuse_rejected, unavailable
from connectors.live.live_view import LiveView
from connectors.live.settled_feed import SettledRecord
from schemas.errors import BackboneUnreachable
from schemas.fold.life_cycles import RUNNING
from schemas.streams.job.job_registry import pick_record
from schemas.streams.session.session_registry import SessionRow
from schemas.wire.verdicts import ILLEGAL_TRANSITION, REJECTED

# A pick that loses this many jobs in a row to other gateways is answered with 503.
CANDIDATES: Final = 64


class FreshView:
    """Catches up with the log for many callers at once.

    Callers that arrive while one query of the log's end is under way share the next query, which begins after
    they arrived.
    """

    def __init__(self, live_view: LiveView, timeout_s: float) -> None:
        self._live_view = live_view
        self._timeout_s = timeout_s
        self._current: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def catch_up(self) -> None:
        """Return when everything that was in the log at the time of this call is settled here.

        Raises: BackboneUnreachable: Kafka is unreachable, or the query under way and the next one take too long
            together.
        """
        if self._current is None or self._current.done():
            mine = self._current = self._begun(None)
        else:
            if self._next is None or self._next.done():
                self._next = self._begun(self._current)
            mine = self._next
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(mine)
        except TimeoutError:
            why = f"Kafka did not say within {self._timeout_s:g} s where the log ends"
            raise BackboneUnreachable(why) from None

    def _begun(self, before: asyncio.Task[None] | None) -> asyncio.Task[None]:
        look = asyncio.create_task(self._look(before))
        # When all callers have given up, the error must still be retrieved once.
        look.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return look

    async def _look(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
            self._current, self._next = self._next, None
        await asyncio.to_thread(self._live_view.catch_up, self._timeout_s)


class Picker:
    """Gives jobs to sessions.

    Each session has one pick or assignment at a time. Concurrent picks of several sessions try different jobs.
    """

    def __init__(
        self,
        live_view: LiveView,
        pending: PendingJobs,
        appender: LogAppender,
        fresh: FreshView,
        timeout_s: float,
    ) -> None:
        self._live_view = live_view
        self._pending = pending
        self._appender = appender
        self._fresh = fresh
        self._timeout_s = timeout_s
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._released = asyncio.Condition()

    async def pick(self, session: str, principal: str) -> tuple[str, SettledRecord | None]:
        """Give `session` its job: the one that it holds, else the oldest pending one that fits.

        Returns:
            The id of the job, and the settled pick; None when the session held the job before.

        Raises:
            ApiError: 404 `no_match`, 409 when the session does not run, 503 `busy`.
            BackboneUnreachable: Kafka is unreachable.
        """
        async with self._alone(session):
            held = self._pending.held_by(session)
            if held is None:
                self._appender.check()
                await self._fresh.catch_up()
                held = self._pending.held_by(session)
            if held is not None:
                return held.job_id, None
            self._check_session(session)
            deadline = time.monotonic() + self._timeout_s
            for _ in range(CANDIDATES):
                job_id = await self._reserve(session, deadline)
                try:
                    settled = await self._appender.settle(pick_record(job_id, session, principal=principal))
                finally:
                    await self._release(job_id)
                if settled.verdict != REJECTED:
                    return job_id, settled
                if time.monotonic() > deadline:
                    break
        raise unavailable("other gateways got the jobs first; try again", BUSY)

    async def assign(self, job_id: str, session: str, principal: str) -> SettledRecord:
        """Give `session` this job.

        Raises:
            ApiError: 409 when the session does not run, has another job, or the job is not pending.
            BackboneUnreachable: Kafka is unreachable.
        """
        async with self._alone(session):
            self._appender.check()
            await self._fresh.catch_up()
            held = self._pending.held_by(session)
            if held is not None and held.job_id != job_id:
                raise ApiError(
                    409, ILLEGAL_TRANSITION, f"the session has job {held.job_id}, which has not ended"
                )
            self._check_session(session)
            return refuse_rejected(
                await self._appender.settle(pick_record(job_id, session, principal=principal))
            )

    def _check_session(self, session: str) -> None:
        row = self._live_view.get(SessionRow, session)
        if row is not None and row.status != RUNNING:
            raise ApiError(409, ILLEGAL_TRANSITION, f"the session is {row.status}")

    async def _reserve(self, session: str, deadline: float) -> str:
        """Reserve the next job to try. While all fitting jobs are reserved, wait for one to be released."""
        async with self._released:
            while (job_id := self._pending.reserve(session)) is None:
                if not self._pending.is_reserved_for(session):
                    raise ApiError(404, NO_MATCH, "no pending job fits this session")
                try:
                    async with asyncio.timeout_at(_loop_time(deadline)):
                        await self._released.wait()
                except TimeoutError:
                    raise unavailable("other requests are picking the jobs that fit; try again", BUSY) from None
        return job_id

    async def _release(self, job_id: str) -> None:
        self._pending.release(job_id)
        async with self._released:
            self._released.notify_all()

    @asynccontextmanager
    async def _alone(self, session: str) -> AsyncIterator[None]:
        lock, users = self._locks.get(session, (asyncio.Lock(), 0))
        self._locks[session] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[session]
            if users == 1:
                del self._locks[session]
            else:
                self._locks[session] = (lock, users - 1)


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + max(0.0, deadline - time.monotonic())
