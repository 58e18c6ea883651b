"""The bodies of jobs (JE-10 to JE-13), and functions that register a job and read its secret and its broker."""

from __future__ import annotations

import uuid
from contextlib import nullcontext
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AwareDatetime, Field, SecretStr, create_model

from connectors.hub.engine.operation import Asked
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import BUSY, refuse_rejected, unavailable
from connectors.hub.serving.models import (
    DIGEST_PATTERN,
    OVERLAP_LIMIT_S,
    WHOLE,
    AnswerBody,
    JobId,
    ListLimit,
    NamedThing,
    PageAnswer,
    QueryFilter,
    RequestBody,
    row_answer,
)
from connectors.operations.rules.hub_policy import job_counted
from schemas.keys.sealing import Keyring, UnsealError, broker_password_purpose, job_secret_purpose
from schemas.streams.job.job_fold import JobGrant, job_grant
from schemas.streams.job.job_registry import DESCRIPTION_LIMIT, BrokerOverlay, JobRegistration, JobRow, Notice
from schemas.wire.wire_body import Note, Printable
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import JOB, stream_key
from trunkline_agent.wire.signing import new_secret
from trunkline_agent.wire.verdicts import REJECTED, SEQ_CONFLICT

_Text = Annotated[Printable, Field(min_length=1, max_length=255)]
_File = Annotated[Printable, Field(min_length=1, max_length=1024)]


class BrokerRequest(RequestBody):
    """The broker settings of one job, which override those of the environment (JE-13)."""

    host: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")] | None = None
    """Name or address of the broker."""
    port: Annotated[int, Field(ge=1, le=65535), WHOLE] | None = None
    """Port of the broker."""
    tls: bool | None = None
    """True if the connection uses TLS."""
    ca_certs: _File | None = None
    """File with the certificates of the authorities that are trusted."""
    certfile: _File | None = None
    """File with the client's certificate."""
    keyfile: _File | None = None
    """File with the client's private key."""
    username: _Text | None = None
    """User name at the broker."""
    password: Annotated[SecretStr, Field(max_length=1024)] | None = None
    """Password at the broker. It is stored sealed."""


class JobRequest(RequestBody):
    """A job to register."""

    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)]
    """Description of the work."""
    session: NamedThing | None = None
    """Only session that may pick the job. Null: any session."""
    broker: BrokerRequest | None = None
    """MQTT broker of this job. Null: the common broker."""
    notify: Annotated[list[Notice], Field(max_length=2)] | None = None
    """Events of which the registering principal gets a message. Null: the end of the job."""


class PickRequest(RequestBody):
    """The session that picks a job, or that a job is assigned to."""

    session: NamedThing
    """Name of the session."""


class CancelRequest(RequestBody):
    """The reason for cancelling a job."""

    reason: Note = ""
    """Reason, for people who read the job's history."""


class EventAnswer(AnswerBody):
    """The receipt of a job's event, with the fields of the receipt over MQTT."""

    ce_id: str
    """Id of the event's record."""
    seq: int | None
    """Number of the event within its job."""
    verdict: Literal["accepted", "duplicate"]
    """Verdict on the event."""
    reason: None
    """Null, because the event was not rejected."""
    position: list[int]
    """Partition and offset of the event's record."""
    status: str | None
    """State of the job after the event."""


class RotationRequest(RequestBody):
    """A rotation of a job's secret."""

    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_S), WHOLE] = 3600
    """How long the present secret stays valid, in seconds."""


class JobFilter(QueryFilter):
    """The jobs to list: those that match every filter, newest first."""

    state: Literal["pending", "running", "completed", "error", "cancelled"] | None = None
    """State of the jobs. Without it: any."""
    session: NamedThing | None = None
    """Session that has the job, or for which a pending job waits. Without it: any."""
    older_than_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)] | None = None
    """Least age of the jobs since their registration, in seconds."""
    newer_than_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)] | None = None
    """Greatest age of the jobs since their registration, in seconds."""
    limit: ListLimit = 100
    """Largest number of jobs in the answer."""


class RegisteredAnswer(AnswerBody):
    """A registered job. A retry with the same idempotency key gets the same secret; nothing else shows it."""

    job_id: JobId
    """Id of the job, 8 hex digits."""
    secret: str
    """Secret with which the job's events are signed."""
    position: Annotated[list[int], Field(min_length=2, max_length=2)]
    """Partition and offset of the record of this change."""


class BrokerAnswer(AnswerBody):
    """The broker of a picked job, with its password in clear. Null: as for the common broker."""

    host: str | None = None
    """Name or address of the broker."""
    port: int | None = None
    """Port of the broker."""
    tls: bool | None = None
    """True if the connection uses TLS."""
    ca_certs: str | None = None
    """File with the certificates of the authorities that are trusted."""
    certfile: str | None = None
    """File with the client's certificate."""
    keyfile: str | None = None
    """File with the client's private key."""
    username: str | None = None
    """User name at the broker."""
    password: str | None = None
    """Password at the broker."""


class GrantAnswer(AnswerBody):
    """A job that a session has picked, with the secret that signs its events."""

    job_id: JobId
    """Id of the job, 8 hex digits."""
    description: str
    """Description of the work."""
    broker: BrokerAnswer | None
    """MQTT broker of this job. Null: the common broker."""
    secret: str
    """Secret with which the job's events are signed."""


class JobChangedAnswer(AnswerBody):
    """A job that was assigned or cancelled."""

    job_id: JobId
    """Id of the job, 8 hex digits."""
    status: str
    """State of the job after the change."""
    verdict: str
    """`accepted`, or `duplicate` if the change had been made before."""


class RotatedAnswer(RegisteredAnswer):
    """The new secret of a job.

    A retry with the same idempotency key repeats it until the next rotation, and the session gets it when it
    picks the job again.
    """

    mqtt_user: str
    """User name for the secret at the MQTT broker of the backbone."""
    old_secret_ends_at: AwareDatetime
    """Time until which the previous secret is valid."""


JobAnswer: Final = row_answer("JobAnswer", JobRow)
JobShownAnswer: Final = create_model(
    "JobShownAnswer",
    __base__=JobAnswer,
    __doc__="A job, with its broker settings if it has any.",
    broker=(BrokerOverlay | None, Field(description="MQTT broker of this job. Null: the common broker.")),
)


class JobsAnswer(AnswerBody):
    """The newest matching jobs, and the number of all matching jobs."""

    jobs: list[JobAnswer]  # type: ignore[valid-type]
    """Jobs, newest first."""
    total: int
    """Number of all matching jobs."""
    left: int
    """Number of jobs that were asked for and are not in the answer, because it would be too long."""


class BrokersFilter(QueryFilter):
    """The place at which the list of brokers goes on."""

    after: Annotated[str, Field(pattern=DIGEST_PATTERN)] | None = None
    """SHA-256 of the last broker of the previous answer. Without it, the list starts at its first."""


class BrokersAnswer(PageAnswer):
    """The distinct broker settings of jobs that have not ended."""

    brokers: list[str]
    """Broker settings as canonical JSON, with sealed passwords."""


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
            broker=None if wanted.broker is None else _sealed_overlay(wanted.broker, keyring),
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


def _sealed_overlay(wanted: BrokerRequest, keyring: Keyring) -> BrokerOverlay:
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
