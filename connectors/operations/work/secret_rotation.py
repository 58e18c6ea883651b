"""A function that rotates the secret of a job (decision 0021)."""

from __future__ import annotations

import uuid
from typing import Any

from connectors.hub.engine.operation import Asked
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.identities import url_safe
from connectors.operations.work.registration import grant_of
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.job.job_fold import JobGrant
from schemas.streams.job.job_registry import JobRow, JobSecretRotation
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.mqtt_password import job_user
from trunkline_agent.wire.verdicts import SEQ_CONFLICT


async def rotate_secret(
    hub: Hub, asked: Asked, job_id: str, overlap_s: int
) -> tuple[dict[str, Any], SettledRecord]:
    """Append a new secret for a job, wait until it is settled, and wait until the job's new MQTT login works.

    Args:
        hub: the hub, with the live view, the keyring and the appender.
        asked: the request. A repeated one, by its idempotency key, gets the same secret.
        job_id: the job.
        overlap_s: for how many seconds the previous secret stays valid.

    Returns:
        The fields of the HTTP answer, with the new secret in clear text, and the settled record.

    Raises:
        ApiError: 404 for an unknown job; 409 for one that has ended, and for a repeated request whose secret a
            later request has replaced.
    """
    known = None if hub.live_view.get(JobRow, job_id) is None else grant_of(hub, job_id)
    secret, keyring = _secret_of(hub.keyring, asked.made, job_id, known)
    record = JobSecretRotation(
        sealed_secret=keyring.seal(secret.encode(), job_secret_purpose(job_id)),
        job_id=job_id,
        overlap_ms=overlap_s * 1000,
        request_id=asked.request_id,
    ).record(**asked.origin)
    settled = await hub.appender.settle_accepted(record)
    grant = grant_of(hub, job_id)
    if secret != grant.secret or grant.old_until is None:
        raise ApiError(409, SEQ_CONFLICT, "a later request has replaced the secret of this request")
    user = job_user(job_id, secret)
    await hub.tell_registered(user)
    answer = {
        "job_id": job_id,
        "secret": secret,
        "position": list(settled.position),
        "mqtt_user": user,
        "old_secret_ends_at": iso_moment(grant.old_until),
    }
    return answer, settled


def _secret_of(keyring: Keyring, made: uuid.UUID, job_id: str, known: JobGrant | None) -> tuple[str, Keyring]:
    """Return the secret that follows from a request, and the keyring that seals it.

    A repeated request gets the same secret, so it need not be stored. Its keyring is that of the first request,
    because the master key may have been rotated since.
    """
    for one in keyring.each():
        secret = _derived(one, made, job_id)
        if known is not None and known.secret == secret:
            return secret, one
    return _derived(keyring, made, job_id), keyring


def _derived(keyring: Keyring, made: uuid.UUID, job_id: str) -> str:
    # The part before the point is not secret: it is in a user name (trunkline_agent.wire.mqtt_password).
    return f"{made.hex[:8]}.{url_safe(keyring.derive(f'rotated-job-secret/{job_id}/{made}'))}"
