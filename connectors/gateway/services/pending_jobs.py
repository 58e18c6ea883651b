"""An index of the pending jobs, in order, and of the jobs that sessions hold.

With it a pick need not scan all jobs. The index may contain a job that is taken already; the row of the live
view decides. It never misses a pending job.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from schemas.fold.life_cycles import PENDING, RUNNING
from schemas.fold.settled import AppliedChange
from schemas.streams.job.job_registry import JobRow

_STALE_MOST = 1000
_Place = tuple[int, str]  # registered_at and job id: the order in which jobs are picked


class _Wait(NamedTuple):
    """A pending job: the session that it waits for (None: any), and its place in the order."""

    session: str | None
    place: _Place


class PendingJobs:
    """The index. Thread-safe. Register `changed` with the live view and call `load` once it is open."""

    def __init__(self, row_of: Callable[[str], JobRow | None]) -> None:
        self._row_of = row_of
        self._lock = threading.Lock()
        self._waits: dict[str, _Wait] = {}
        self._stale = 0  # at most so many places in the heaps belong to jobs that are not pending
        self._waiting: dict[str | None, list[_Place]] = {}  # heaps by wanted session
        self._reserved: dict[str, _Place] = {}
        self._held: dict[str, set[str]] = {}

    def load(self, rows: Iterable[JobRow]) -> None:
        """Add the rows of the opened live view."""
        with self._lock:
            for row in rows:
                self._add(row)

    def changed(self, change: AppliedChange) -> None:
        """Apply a change of the live view."""
        if isinstance(change.row, JobRow):
            with self._lock:
                self._add(change.row)

    def held_by(self, session: str) -> JobRow | None:
        """Return the job that `session` is running; of several the one picked first."""
        with self._lock:
            job_ids = list(self._held.get(session, ()))
        rows = [row for job_id in job_ids if (row := self._row_of(job_id)) is not None]
        running = [row for row in rows if row.status == RUNNING and row.session == session]
        return min(running, key=lambda row: (row.picked_at or 0, row.job_id), default=None)

    def reserve(self, session: str) -> str | None:
        """Reserve the oldest job that `session` may pick, until `release`.

        Returns:
            The id of the job; None when no unreserved job fits.
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
        """Release a reserved job. If it is still pending, it can be reserved again."""
        with self._lock:
            place = self._reserved.pop(job_id, None)
            if place is not None and job_id in self._waits:
                heapq.heappush(self._waiting.setdefault(self._waits[job_id].session, []), place)

    def is_reserved_for(self, session: str) -> bool:
        """Return whether a job that fits `session` is reserved, and so may become free."""
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
