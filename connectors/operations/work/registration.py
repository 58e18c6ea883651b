"""Functions that register a job (JE-10), read its secret for a session (JE-11), and seal its broker (JE-13)."""

from __future__ import annotations

import uuid
from contextlib import nullcontext
from typing import Any, Final

import orjson

from connectors.hub.engine.operation import Asked
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import BUSY, refuse_rejected, unavailable
from connectors.operations.rules.job_models import BrokerRequest, JobRequest
from connectors.operations.rules.message_limits import job_counted
from schemas.keys.sealing import Keyring, UnsealError, broker_password_purpose, job_secret_purpose
from schemas.streams.job.job_fold import JobGrant, job_grant
from schemas.streams.job.job_registry import BrokerOverlay, JobRegistration, JobRow
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import JOB, stream_key
from trunkline_agent.wire.signing import new_secret
from trunkline_agent.wire.verdicts import REJECTED, SEQ_CONFLICT

# How many ids are tried. With 100,000 jobs one in 40,000 registrations needs a second id.
_ATTEMPTS: Final = 8
_ROUTE: Final = "POST /api/hub/jobs"


async def register(hub: Hub, asked: Asked, wanted: JobRequest) -> tuple[str, str, SettledRecord]:
    """Append the registration of a job and wait until it is settled.

    With an idempotency key the job's id follows from the key, and a repeated request writes the same secret
    again. So the fold can tell a repeated request (duplicate) from another one with the same key (conflict).

    Args:
        hub: the hub, with the live view, the keyring and the appender.
        asked: the request, with its id, its principal and its idempotency key.
        wanted: the body of the request.

    Returns:
        The id of the job, its present secret in clear text, and the settled record.

    Raises:
        ApiError: 409 for another request with the same key, 429 (`limit_reached`) when the principal has as
            many live jobs as it may have, 503 when no id is free, or the status that belongs to another reason
            of a rejected record.
    """
    made = asked.made
    for _ in range(_ATTEMPTS):
        job_id = made.hex[:8]
        row = hub.live_view.get(JobRow, job_id)
        known = None if row is None else grant_of(hub, job_id)
        if known is not None and known.request_id != asked.request_id:
            made = uuid.uuid5(made, "taken")
            continue
        secret = new_secret() if known is None else known.registered_secret
        # The first request may have used an earlier master key, and a repeated one must have the same bytes.
        keyring = hub.keyring if known is None else hub.keyring.under(known.key_id)
        record = JobRegistration(
            sealed_secret=keyring.seal(secret.encode(), job_secret_purpose(job_id)),
            job_id=job_id,
            description=wanted.description,
            session=wanted.session,
            broker=None if wanted.broker is None else sealed_overlay(wanted.broker, keyring),
            request_id=asked.request_id,
            notify=wanted.notify,
        ).record(**asked.origin)
        # A repeated request makes no further job.
        is_new = known is None
        with job_counted(hub, asked.principal, _ROUTE) if is_new else nullcontext():
            settled = await hub.appender.settle(record)
        if settled.verdict == REJECTED and settled.reason == SEQ_CONFLICT and row is None:
            # Another request got the id first. Its row decides in the next turn.
            continue
        # The first secret may have been rotated; the registrar gets the present one.
        return job_id, secret if known is None else known.secret, refuse_rejected(settled)
    raise unavailable("no job id is free; try again", BUSY)


def grant_of(hub: Hub, job_id: str) -> JobGrant:
    """Return a job's grant: its secret, description, broker and the request that registered it.

    The grant comes from the stream state in the live view. Raises TrunklineError when the stream state has no
    such job, or when no master key opens the job's secret.
    """
    try:
        grant = job_grant(job_id, hub.live_view.entries(stream_key(JOB, job_id)), hub.keyring)
    except UnsealError as error:
        raise TrunklineError(f"the secret of job {job_id} cannot be opened: {error}") from None
    if grant is None:
        raise TrunklineError(f"job {job_id} has a row and no entries")
    return grant


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
