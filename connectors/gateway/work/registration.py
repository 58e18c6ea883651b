"""Registering a job at the gateway (JE-10), and what a session gets that has picked one (JE-11)."""

from __future__ import annotations

import uuid
from typing import Any, Final

import orjson

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import BUSY, refuse_rejected, unavailable
from connectors.gateway.web.idempotency import request_uuid
from connectors.gateway.web.models import BrokerRequest, JobRequest
from connectors.gateway.web.refusals import DOOR
from connectors.live.settled_feed import SettledRecord
from schemas.errors import TrunklineError
from schemas.keys.sealing import Keyring, UnsealError, broker_password_purpose
from schemas.streams.job.job_fold import JobGrant, job_grant
from schemas.streams.job.job_registry import BrokerOverlay, registration_record
from schemas.wire.ids import JOB, stream_key
from schemas.wire.signing import new_secret
from schemas.wire.verdicts import REJECTED, SEQ_CONFLICT

# How many ids are tried when one is taken; with 100,000 jobs the second is taken once in 40,000 times.
_ATTEMPTS: Final = 8


async def register(
    hub: Hub, wanted: JobRequest, principal: str, key: str | None
) -> tuple[str, str, SettledRecord]:
    """Register a job: its id, its secret, and the settled record.

    With an idempotency key the id follows from the key, and the secret of the first time goes into the record
    again, so that the fold itself tells the same request (duplicate) from another one under its key (ApiError
    409).
    """
    made = request_uuid(principal, key)
    request_id = str(made)
    for _ in range(_ATTEMPTS):
        job_id = made.hex[:8]
        row = hub.job_row(job_id)
        known = None if row is None else grant_of(hub, job_id)
        if known is not None and known.request_id != request_id:
            made = uuid.uuid5(made, "taken")
            continue
        secret = new_secret() if known is None else known.registered_secret
        # The first time may have been under an earlier master key; the same request has the same bytes.
        keyring = hub.keyring if known is None else hub.keyring.under(known.key_id)
        record = registration_record(
            job_id,
            secret,
            wanted.description,
            keyring,
            session=wanted.session,
            broker=None if wanted.broker is None else sealed_overlay(wanted.broker, keyring),
            request_id=request_id,
            notify=wanted.notify,
            door=DOOR,
            principal=principal,
        )
        settled = await hub.appender.settle(record)
        if settled.verdict == REJECTED and settled.reason == SEQ_CONFLICT and row is None:
            # Somebody was faster: now the row says who, and the next turn decides.
            continue
        # The first one may be good no more: who registered the job is told the one of now.
        return job_id, secret if known is None else known.secret, refuse_rejected(settled)
    raise unavailable("no job id is free; ask again", BUSY)


def grant_of(hub: Hub, job_id: str) -> JobGrant:
    """What the holder of a known job gets. Raises TrunklineError when its secret cannot be opened."""
    try:
        grant = job_grant(job_id, hub.live_view.entries(stream_key(JOB, job_id)), hub.keyring)
    except UnsealError as error:
        raise TrunklineError(f"the secret of job {job_id} cannot be opened: {error}") from None
    if grant is None:
        raise TrunklineError(f"job {job_id} has a row and no entries")
    return grant


def sealed_overlay(wanted: BrokerRequest, keyring: Keyring) -> BrokerOverlay:
    """The overlay as it goes into the log: its password sealed for its host and user."""
    fields = wanted.model_dump(exclude={"password"})
    if wanted.password is not None:
        purpose = broker_password_purpose(wanted.host, wanted.port, wanted.username)
        fields["sealed_password"] = keyring.seal(wanted.password.get_secret_value().encode("utf-8"), purpose)
    return BrokerOverlay(**fields)


def opened_overlay(overlay: str | None, keyring: Keyring) -> dict[str, Any] | None:
    """The overlay of a grant as the winner sees it: its password opened. Raises TrunklineError."""
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
