"""The per-job brokers (JE-13): broker settings of a job, called overlays, that override those of the stack."""

from __future__ import annotations

import threading
from typing import Any

import orjson
import structlog

from connectors.gateway.rules.job_models import BrokerRequest
from connectors.live.live_view import LiveView
from schemas.errors import TrunklineError
from schemas.keys.sealing import Keyring, UnsealError, broker_password_purpose
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import JOB_TERMINAL, BrokerOverlay, JobRow
from schemas.wire.ids import JOB, stream_key

log = structlog.stdlib.get_logger(__name__)


class BrokerOverlays:
    """The distinct per-job brokers of all live jobs, for the MQTT bridge, which connects to each. Thread-safe.

    A job's broker never changes, so each is read from the live view once and then kept. `keyring` opens the
    secrets of jobs.
    """

    def __init__(self, live_view: LiveView, keyring: Keyring) -> None:
        self._live_view = live_view
        self._keyring = keyring
        self._lock = threading.Lock()
        self._overlay_by_job: dict[str, str | None] = {}

    def distinct(self) -> list[str]:
        """Return each per-job broker of the live jobs once, as canonical JSON with a sealed password, sorted.

        Empty when no live job has a broker of its own. A job whose secret cannot be opened is skipped, with a
        warning in the log output. May block, because it reads the live view: call it on a thread.
        """
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
    """Return a job's requested broker in the form that is stored in the log: with its password sealed.

    The sealed password can be opened only for the same host, port and user. A request without a password gives
    a broker without one.
    """
    fields = wanted.model_dump(exclude={"password"})
    if wanted.password is not None:
        purpose = broker_password_purpose(wanted.host, wanted.port, wanted.username)
        fields["sealed_password"] = keyring.seal(wanted.password.get_secret_value().encode("utf-8"), purpose)
    return BrokerOverlay(**fields)


def opened_overlay(overlay: str | None, keyring: Keyring) -> dict[str, Any] | None:
    """Return the fields of a job's broker with its password in clear text, for the session that picks the job.

    `overlay` is the broker as JSON with a sealed password; None: the job has no broker of its own, and None is
    returned. Raises TrunklineError when no master key opens the password.
    """
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
