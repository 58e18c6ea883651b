"""The jobs that wait to be picked, in order, and the jobs that sessions hold: an index over the live view.

So that a pick does not look at every job. The index may name a job that is taken already (the live view's
row decides), and never misses one that waits.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from schemas.fold.life_cycles import PENDING, RUNNING
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import REGISTRY_JOBS, JobRow, Row

_STALE_MOST = 1000
_Place = tuple[int, str]  # registered_at and job id: the order in which jobs are picked


class _Wait(NamedTuple):
    """A job that waits: for which session (None: any), and its place in the order."""

    session: str | None
    place: _Place


class PendingJobs:
    """Thread-safe. Give `changed` to the live view and call `load` when it is open."""

    def __init__(self, row_of: Callable[[str], JobRow | None]) -> None:
        self._row_of = row_of
        self._lock = threading.Lock()
        self._waits: dict[str, _Wait] = {}
        self._stale = 0  # places in the heaps of jobs that wait no more, at most
        self._waiting: dict[str | None, list[_Place]] = {}  # heaps by the session that is wanted
        self._reserved: dict[str, _Place] = {}
        self._held: dict[str, set[str]] = {}

    def load(self, rows: Iterable[Row]) -> None:
        """Take in what the live view held when it was opened."""
        with self._lock:
            for row in rows:
                if isinstance(row, JobRow):
                    self._take_in(row)

    def changed(self, change: AppliedChange) -> None:
        """Take in a change of the live view."""
        if change.view == REGISTRY_JOBS and isinstance(change.row, JobRow):
            with self._lock:
                self._take_in(change.row)

    def held_by(self, session: str) -> JobRow | None:
        """The job that `session` is running; of several the one picked first."""
        with self._lock:
            job_ids = list(self._held.get(session, ()))
        rows = [row for job_id in job_ids if (row := self._row_of(job_id)) is not None]
        running = [row for row in rows if row.status == RUNNING and row.session == session]
        return min(running, key=lambda row: (row.picked_at or 0, row.job_id), default=None)

    def reserve(self, session: str) -> str | None:
        """The oldest job that `session` may pick and that nobody here is about to pick; it is reserved until
        `release`. None when there is none.
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
                # Taken or gone; its row's change is here already or on its way.
                self._forget(job_id)

    def release(self, job_id: str) -> None:
        """Give back a reserved job; if it still waits, it may be reserved again."""
        with self._lock:
            place = self._reserved.pop(job_id, None)
            if place is not None and job_id in self._waits:
                heapq.heappush(self._waiting.setdefault(self._waits[job_id].session, []), place)

    def is_reserved_for(self, session: str) -> bool:
        """Whether somebody here is about to pick a job that `session` might get if that fails."""
        with self._lock:
            reserved = (self._waits[job_id] for job_id in self._reserved if job_id in self._waits)
            return any(wait.session in (None, session) for wait in reserved)

    def _take_in(self, row: JobRow) -> None:
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
            self._make_heaps_anew()

    def _make_heaps_anew(self) -> None:
        # A job that was cancelled, or given away elsewhere, leaves its place in a heap that nobody may read.
        self._stale = 0
        self._waiting.clear()
        for session, place in sorted(self._waits.values(), key=lambda wait: wait.place):
            if place[1] not in self._reserved:
                self._waiting.setdefault(session, []).append(place)
