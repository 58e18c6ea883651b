"""The broker settings of jobs that override those of the environment (JE-13)."""

from __future__ import annotations

import threading
from typing import Any

import orjson
import structlog

from connectors.gateway.web.models import BrokerRequest
from connectors.live.live_view import LiveView
from schemas.errors import TrunklineError
from schemas.keys.sealing import Keyring, UnsealError, broker_password_purpose
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import JOB_TERMINAL, BrokerOverlay, JobRow
from schemas.wire.ids import JOB, stream_key

log = structlog.stdlib.get_logger(__name__)


class BrokerOverlays:
    """The distinct broker settings of live jobs. The MQTT bridge keeps a connection for each.

    They never change, so the state of a job's stream is read once. Thread-safe; `distinct` may block.
    """

    def __init__(self, live_view: LiveView, keyring: Keyring) -> None:
        self._live_view = live_view
        self._keyring = keyring
        self._lock = threading.Lock()
        self._overlay_by_job: dict[str, str | None] = {}

    def distinct(self) -> list[str]:
        """Return the canonical JSON of each, with sealed passwords, sorted."""
        with self._lock:
            known = self._overlay_by_job
            live = [row.job_id for row in self._live_view.all(JobRow) if row.status not in JOB_TERMINAL]
            self._overlay_by_job = {
                job_id: known[job_id] if job_id in known else self._read(job_id) for job_id in live
            }
            return sorted({overlay for overlay in self._overlay_by_job.values() if overlay is not None})

    def _read(self, job_id: str) -> str | None:
        try:
            grant = job_grant(job_id, self._live_view.entries(stream_key(JOB, job_id)), self._keyring)
        except UnsealError as error:
            log.warning("job_secret_sealed", job_id=job_id, error=str(error))
            return None
        return None if grant is None else grant.broker


def sealed_overlay(wanted: BrokerRequest, keyring: Keyring) -> BrokerOverlay:
    """Return the broker settings for the log. The password is sealed for its host, port and user."""
    fields = wanted.model_dump(exclude={"password"})
    if wanted.password is not None:
        purpose = broker_password_purpose(wanted.host, wanted.port, wanted.username)
        fields["sealed_password"] = keyring.seal(wanted.password.get_secret_value().encode("utf-8"), purpose)
    return BrokerOverlay(**fields)


def opened_overlay(overlay: str | None, keyring: Keyring) -> dict[str, Any] | None:
    """Return the broker settings of a picked job, with the password in clear. Raises TrunklineError."""
    if overlay is None:
        return None
    fields: dict[str, Any] = orjson.loads(overlay)
    sealed = fields.pop("sealed_password", None)
    fields["password"] = None
    if sealed is not None:
        purpose = broker_password_purpose(fields.get("host"), fields.get("port"), fields.get("username"))
        try:
            fields["password"] = keyring.open(sealed, purpose).decode("utf-8")
        except UnsealError as error:
            raise TrunklineError(f"the broker's password cannot be opened: {error}") from None
    return fields
