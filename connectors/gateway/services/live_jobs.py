"""An index of the jobs without an end, by the principal that registered them (LM-04)."""

from __future__ import annotations

from connectors.gateway.services.row_index import RowIndex
from schemas.streams.job.job_registry import JobRow


class LiveJobs(RowIndex[JobRow]):
    """The ids of the live jobs of each principal. Thread-safe. The memory is that of live jobs."""

    def __init__(self) -> None:
        super().__init__(JobRow)
        self._jobs: dict[str, set[str]] = {}

    def count(self, principal: str) -> int:
        """Return the number of jobs without an end that a principal has registered, through any door."""
        with self._lock:
            return len(self._jobs.get(principal, ()))

    def _add(self, row: JobRow) -> None:
        # A job's registrar never changes. It is stored as `<door>/<principal>`.
        principal = row.registered_by.partition("/")[2]
        if row.is_live:
            self._jobs.setdefault(principal, set()).add(row.job_id)
            return
        jobs = self._jobs.get(principal)
        if jobs is not None:
            jobs.discard(row.job_id)
            if not jobs:
                del self._jobs[principal]
