"""An index of the per-job brokers (JE-13) that live jobs name; they are called overlays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import structlog

from connectors.hub.lists.row_index import RowIndex
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring, UnsealError
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import JOB_TERMINAL, JobRow
from trunkline_agent.wire.ids import JOB, stream_key

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
