"""Giving a job a new secret at the gateway (decision 0021)."""

from __future__ import annotations

import base64
import uuid
from typing import Any

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import ApiError, iso_moment, refuse_rejected
from connectors.gateway.web.idempotency import request_uuid
from connectors.gateway.web.refusals import DOOR
from connectors.gateway.work.registration import grant_of
from connectors.live.settled_feed import SettledRecord
from schemas.keys.mqtt_password import job_user
from schemas.keys.sealing import Keyring
from schemas.streams.job.job_fold import JobGrant
from schemas.streams.job.job_registry import rotation_record
from schemas.wire.verdicts import SEQ_CONFLICT


async def rotate_secret(
    hub: Hub, job_id: str, overlap_s: int, principal: str, key: str | None
) -> tuple[dict[str, Any], SettledRecord]:
    """Give the job a new secret: the answer, and the settled record. Raises ApiError: 404 for an unknown job,
    409 for one that has ended, and for a request whose secret a later one has replaced.
    """
    made = request_uuid(principal, key)
    known = None if hub.job_row(job_id) is None else grant_of(hub, job_id)
    secret, keyring = _secret_of(hub.keyring, made, job_id, known)
    record = rotation_record(
        job_id,
        secret,
        overlap_s * 1000,
        keyring,
        request_id=str(made),
        door=DOOR,
        principal=principal,
    )
    settled = refuse_rejected(await hub.appender.settle(record))
    grant = grant_of(hub, job_id)
    if secret != grant.secret or grant.old_until is None:
        raise ApiError(
            409, SEQ_CONFLICT, "the job was given this secret by the same request, and another since"
        )
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
    """The secret that this request makes, the same each time, so that it need not be kept, and unknown to
    whoever has no master key; and the keyring that seals it: the first time another key may have been active.
    """
    for one in keyring.each():
        secret = _derived(one, made, job_id)
        if known is not None and known.secret == secret:
            return secret, one
    return _derived(keyring, made, job_id), keyring


def _derived(keyring: Keyring, made: uuid.UUID, job_id: str) -> str:
    # What stands before the point is no secret: it is part of a user name (schemas.keys.mqtt_password).
    raw = keyring.derive(f"rotated-job-secret/{job_id}/{made}")
    return f"{made.hex[:8]}.{base64.urlsafe_b64encode(raw).decode('ascii').rstrip('=')}"
