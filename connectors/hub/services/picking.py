"""Picking jobs (JE-11): a session gets the oldest pending job that it may have; and the brokers of live jobs.

When several gateways give out the same job at once, the order of their records in the log decides. The per-job
brokers (JE-13) that live jobs name are called overlays.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import structlog

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowIndex
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.log_appender import LogAppender
from connectors.hub.serving.answers import BUSY, NO_MATCH, ApiError, refuse_rejected, unavailable
from schemas.fold.entries import Entries
from schemas.fold.stream_kind import PENDING, RUNNING
from schemas.keys.sealing import Keyring, UnsealError
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import JOB_TERMINAL, JobPick, JobRow
from schemas.streams.session.sessions import SessionRow
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.ids import JOB, stream_key
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, REJECTED

log = structlog.stdlib.get_logger(__name__)


class BrokerOverlays(RowIndex[JobRow]):
    """The distinct per-job brokers of all live jobs, for the MQTT bridge, which connects to each. Thread-safe.

    A job's broker never changes, so each is read once, when it is asked for. The memory is that of live jobs.

    Args:
        entries: Returns the stream state of the stream with this name, such as `job/0a1b2c3d`.
        keyring: Opens the secrets of jobs.
    """

    def __init__(self, entries: Callable[[str], Entries], keyring: Keyring) -> None:
        super().__init__(JobRow)
        self._entries = entries
        self._keyring = keyring
        # The live jobs whose brokers are not read yet, the brokers of the others, and how many jobs name each.
        self._unread: set[str] = set()
        self._overlay_by_job: dict[str, str | None] = {}
        self._named: Counter[str] = Counter()

    def distinct(self) -> list[str]:
        """Return each per-job broker of the live jobs once, as canonical JSON with a sealed password, sorted.

        Empty when no live job has a broker of its own. A job whose secret cannot be opened is skipped, with a
        warning in the log output. May block, because it opens the secrets of new jobs: call it on a thread.
        """
        with self._lock:
            # A set that was large once takes long to iterate, also when it is empty.
            unread = list(self._unread) if self._unread else []
        for job_id in unread:
            overlay = self._read(job_id)
            with self._lock:
                if job_id in self._unread:  # it has not ended, and no other thread has read it
                    self._unread.remove(job_id)
                    self._overlay_by_job[job_id] = overlay
                    if overlay is not None:
                        self._named[overlay] += 1
        with self._lock:
            return sorted(self._named)

    def _add(self, row: JobRow) -> None:
        if row.status not in JOB_TERMINAL:
            if row.job_id not in self._overlay_by_job:
                self._unread.add(row.job_id)
            return
        self._unread.discard(row.job_id)
        overlay = self._overlay_by_job.pop(row.job_id, None)
        if overlay is not None:
            self._named[overlay] -= 1
            if not self._named[overlay]:
                del self._named[overlay]

    def _read(self, job_id: str) -> str | None:
        try:
            grant = job_grant(job_id, self._entries(stream_key(JOB, job_id)), self._keyring)
        except UnsealError as error:
            log.warning("job_secret_sealed", job_id=job_id, error=str(error))
            return None
        return None if grant is None else grant.broker


# A pick that loses this many jobs in a row to other gateways is answered with 503.
CANDIDATES: Final = 64


_STALE_MOST: Final = 1000
_Place = tuple[int, str]  # registered_at and job id: the order in which jobs are picked


class _Wait(NamedTuple):
    """A pending job: the session that it waits for (None: any), and its place in the order."""

    session: str | None
    place: _Place


class PendingJobs(RowIndex[JobRow]):
    """An index of the pending jobs, oldest first, and of the job that each session runs. Thread-safe.

    With this index a pick need not scan all jobs. It never misses a pending job, but may contain a job that is
    taken already. Therefore it checks each job by `row_of`, which returns the job's present row in the live
    view.
    """

    def __init__(self, row_of: Callable[[str], JobRow | None]) -> None:
        super().__init__(JobRow)
        self._row_of = row_of
        self._waits: dict[str, _Wait] = {}
        self._stale = 0  # at most so many places in the heaps belong to jobs that are not pending
        self._waiting: dict[str | None, list[_Place]] = {}  # heaps by wanted session
        self._reserved: dict[str, _Place] = {}
        self._held: dict[str, set[str]] = {}

    def held_by(self, session: str) -> JobRow | None:
        """Return the row of the job that a session runs now, or None if it runs none.

        `session` is the session's name. If the session runs several jobs, it is the one picked first.
        """
        with self._lock:
            job_ids = list(self._held.get(session, ()))
        rows = [row for job_id in job_ids if (row := self._row_of(job_id)) is not None]
        running = [row for row in rows if row.status == RUNNING and row.session == session]
        return min(running, key=lambda row: (row.picked_at or 0, row.job_id), default=None)

    def reserve(self, session: str) -> str | None:
        """Reserve the oldest pending job that a session may have, and return its id. Does not block.

        A session may have a job that names this session or none. No other call of `reserve` returns a reserved
        job. The caller then appends the record that picks the job, and calls `release`, whatever the verdict.

        Returns:
            The id of the job. None if no job is pending for the session, or other callers have reserved each
            such job. Then `is_reserved_for` tells the two cases apart.
        """
        with self._lock:
            while True:
                heaps = [heap for wanted in (None, session) if (heap := self._waiting.get(wanted))]
                if not heaps:
                    return None
                place = heapq.heappop(min(heaps, key=lambda heap: heap[0]))
                job_id = place[1]
                row = self._row_of(job_id)
                if row is not None and row.status == PENDING and job_id in self._waits:
                    self._reserved[job_id] = place
                    return job_id
                # It was taken; the change of its row has arrived or will arrive.
                self._forget(job_id)

    def release(self, job_id: str) -> None:
        """End the reservation of a job. If the job is still pending, `reserve` can return it again.

        A job that is not reserved is ignored.
        """
        with self._lock:
            place = self._reserved.pop(job_id, None)
            if place is not None and job_id in self._waits:
                heapq.heappush(self._waiting.setdefault(self._waits[job_id].session, []), place)

    def is_reserved_for(self, session: str) -> bool:
        """Return whether some caller has reserved a job that this session may have.

        Such a job names this session or none. It can become free again by `release`, so it is worth waiting
        for.
        """
        with self._lock:
            reserved = (self._waits[job_id] for job_id in self._reserved if job_id in self._waits)
            return any(wait.session in (None, session) for wait in reserved)

    def _add(self, row: JobRow) -> None:
        if row.status == PENDING:
            if row.job_id not in self._waits:
                place = (row.registered_at, row.job_id)
                self._waits[row.job_id] = _Wait(row.session_wanted, place)
                heapq.heappush(self._waiting.setdefault(row.session_wanted, []), place)
            return
        self._forget(row.job_id)
        if row.session is None:
            return
        held = self._held.setdefault(row.session, set())
        if row.status == RUNNING:
            held.add(row.job_id)
        else:
            held.discard(row.job_id)
            if not held:
                del self._held[row.session]

    def _forget(self, job_id: str) -> None:
        if self._waits.pop(job_id, None) is None:
            return
        self._stale += 1
        if self._stale > _STALE_MOST + len(self._waits):
            self._rebuild_heaps()

    def _rebuild_heaps(self) -> None:
        # A job that was cancelled, or picked at another gateway, leaves its place in a heap.
        self._stale = 0
        self._waiting.clear()
        for session, place in sorted(self._waits.values(), key=lambda wait: wait.place):
            if place[1] not in self._reserved:
                self._waiting.setdefault(session, []).append(place)


class FreshView:
    """Lets many coroutines wait until the live view has caught up with the log, with few queries to Kafka.

    Coroutines that call `catch_up` while one query of the log's end is under way share the next query. It
    begins after they have called.
    """

    def __init__(self, live_view: LiveView, timeout_s: float) -> None:
        self._live_view = live_view
        self._timeout_s = timeout_s
        self._current: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def catch_up(self) -> None:
        """Wait until the live view has settled all records that were in the log at the time of this call.

        Raises:
            BackboneUnreachable: Kafka is unreachable, or the wait exceeds `timeout_s` of the constructor.
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
    """Gives pending jobs to sessions, for coroutines of one event loop.

    Picks and assignments of one session run one after the other. Concurrent picks of several sessions try
    different jobs.
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
        # A lock lives as long as a request holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._released = asyncio.Condition()

    async def pick(self, session: str, principal: str) -> tuple[str, SettledRecord | None]:
        """Give a session the job that it runs already, or else the oldest pending job that it may have.

        A session may have a job that was registered for this session or for any. Waits at most a few times
        `timeout_s` of the constructor.

        Args:
            session: The name of the session.
            principal: The principal that makes the request, for the record.

        Returns:
            The id of the job, and the settled record of the pick. The record is None if the session ran the job
            already.

        Raises:
            ApiError: 404 `no_match` if no pending job is for this session. 409 if the session's row says that
                it does not run. 503 `busy` if other requests got all the jobs that were tried, or the timeout
                passed.
            BackboneUnreachable: Kafka is unreachable, or the live view did not catch up or settle the record in
                time.
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
                    settled = await self._appender.settle(
                        JobPick(job_id=job_id, session=session).record(principal=principal, door="http")
                    )
                finally:
                    await self._release(job_id)
                if settled.verdict != REJECTED:
                    return job_id, settled
                if time.monotonic() > deadline:
                    break
        raise unavailable("other gateways got the jobs first; try again", BUSY)

    async def assign(self, job_id: str, session: str, principal: str) -> SettledRecord:
        """Give a session one particular job, and return the settled record.

        The verdict of the record is *accepted* or *duplicate*. `principal` is the principal that makes the
        request, for the record.

        Raises:
            ApiError: 409 if the session does not run, runs another job, or the job is not pending. Another
                status if the fold rejects the record for another reason, such as an unknown job.
            BackboneUnreachable: Kafka is unreachable, or the live view did not catch up or settle the record in
                time.
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
                await self._appender.settle(
                    JobPick(job_id=job_id, session=session).record(principal=principal, door="http")
                )
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

    def _alone(self, session: str) -> asyncio.Lock:
        return self._locks.setdefault(session, asyncio.Lock())


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + max(0.0, deadline - time.monotonic())
