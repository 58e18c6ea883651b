"""The distinct broker overlays of live jobs (JE-13): the bridge keeps a connection for each."""

from __future__ import annotations

import threading

import structlog

from connectors.live.live_view import LiveView
from schemas.fold.life_cycles import JOB_TERMINAL
from schemas.fold.view_rows import REGISTRY_JOBS, JobRow
from schemas.keys.sealing import Keyring, UnsealError
from schemas.streams.job.job_fold import job_grant
from schemas.wire.ids import JOB, stream_key

log = structlog.stdlib.get_logger(__name__)


class BrokerOverlays:
    """Reads a job's entries once: an overlay does not change. Thread-safe; blocks, so not for an event loop."""

    def __init__(self, live_view: LiveView, keyring: Keyring) -> None:
        self._live_view = live_view
        self._keyring = keyring
        self._lock = threading.Lock()
        self._overlay_by_job: dict[str, str | None] = {}

    def distinct(self) -> list[str]:
        """Canonical JSON of each overlay, passwords sealed, sorted."""
        with self._lock:
            live = {
                row.job_id
                for row in self._live_view.rows(REGISTRY_JOBS)
                if isinstance(row, JobRow) and row.status not in JOB_TERMINAL
            }
            self._overlay_by_job = {
                job_id: self._overlay_by_job[job_id] if job_id in self._overlay_by_job else self._read(job_id)
                for job_id in live
            }
            return sorted({overlay for overlay in self._overlay_by_job.values() if overlay is not None})

    def _read(self, job_id: str) -> str | None:
        try:
            grant = job_grant(job_id, self._live_view.entries(stream_key(JOB, job_id)), self._keyring)
        except UnsealError as error:
            log.warning("job_secret_sealed", job_id=job_id, error=str(error))
            return None
        return None if grant is None else grant.broker
