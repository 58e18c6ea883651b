"""The records that register, pick and cancel a job (JE-10 to JE-12) and rotate its secret.

This module has their wire models and the functions that build them.
"""

from __future__ import annotations

import uuid
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.fold.life_cycles import CANCELLED, COMPLETED, ERROR, PENDING, RUNNING, terminal_states
from schemas.fold.view_rows import Moment, Row
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.job.job_event import JOB_EVENT, JobEvent
from schemas.wire.ids import JOB, stream_key
from schemas.wire.record import OutgoingRecord, content_id
from schemas.wire.wire_body import OVERLAP_LIMIT_MS, JobId, Name, Note, Printable, WireBody

JOB_REGISTERED: Final = "job.registered"
JOB_PICKED: Final = "job.picked"
JOB_CANCELLED: Final = "job.cancelled"
JOB_SECRET_ROTATED: Final = "job.secret_rotated"  # noqa: S105  a type's name
REGISTRY_JOBS: Final = "registry_jobs"

JOB_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    PENDING: frozenset({RUNNING, CANCELLED}),
    RUNNING: frozenset({COMPLETED, ERROR, CANCELLED}),
    COMPLETED: frozenset(),
    ERROR: frozenset(),
    CANCELLED: frozenset(),
}
JOB_STATES: Final = tuple(JOB_TRANSITIONS)
JOB_TERMINAL: Final = terminal_states(JOB_TRANSITIONS)

DESCRIPTION_LIMIT: Final = 4000
# The events that the principal that registered a job can ask to be notified of in its mailbox.
PERMISSION: Final = "permission"
END: Final = "end"
Notice = Literal["permission", "end"]


class JobRow(Row, frozen=True, gc=False):
    """A row of `registry_jobs`: a job and its progress.

    `session_wanted` is the only session that may pick the job; `None` means any. `session` is the session that
    picked it. `ended_by` is the CloudEvents id of the record that ended the job. `notify` lists the events of
    which the principal that registered the job is notified; `None` means its end. `secret_rotations` is how
    often the secret was rotated; `None` means never. The previous secret is valid, too, until
    `old_secret_ends_at`.
    """

    VIEW: ClassVar = REGISTRY_JOBS
    KEY: ClassVar = ("job_id",)

    job_id: str
    """Id of the job, 8 hex digits."""
    status: str
    """`pending`, `running`, `completed`, `error` or `cancelled`."""
    description: str
    """Description by the principal that registered the job."""
    session_wanted: str | None
    """Only session that may pick the job. Null: any session."""
    session: str | None
    """Session that picked the job."""
    registered_by: str
    """Principal that registered the job."""
    registered_at: Moment
    """Time of the registration."""
    picked_at: Moment | None
    """Time at which the session picked the job."""
    started_at: Moment | None
    """Time of the event `started`."""
    ended_at: Moment | None
    """Time at which the job ended."""
    ended_by: str | None
    """CloudEvents id of the record that ended the job."""
    last_seq: int
    """Highest seq of an accepted event."""
    last_event: str | None
    """Kind of the event with the highest seq."""
    last_detail: str | None
    """Its detail, masked if it was unsafe."""
    events: int
    """Number of accepted events."""
    notify: list[str] | None = None
    """Events of which the principal that registered the job is notified. Null: its end."""
    secret_rotations: int | None = None
    """How often the secret was rotated. Null: never."""
    old_secret_ends_at: Moment | None = None
    """Time until which the previous secret is valid, too."""


class BrokerOverlay(BaseModel):
    """The settings of a per-job broker (JE-13). `None` means the value of the environment's settings."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    host: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    tls: bool | None = None
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    username: str | None = None
    sealed_password: str | None = None


class JobRegistration(WireBody):
    """Body of `job.registered`: a new job.

    `sealed_secret` is sealed for the purpose `job-secret/<job_id>`. `request_id` is the id of the request that
    registered the job; `job_id` may be derived from its first 32 bits. A `notify` of `None` means `["end"]`.
    """

    job_id: JobId
    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)]
    session: Name | None = None
    broker: BrokerOverlay | None = None
    request_id: Name | None = None
    sealed_secret: str
    # The field was added later. Without a null here, a repeated registration has the same content as before.
    notify: Annotated[
        Annotated[list[Notice], Field(max_length=2)] | None, Field(exclude_if=lambda notify: notify is None)
    ] = None


class JobPick(WireBody):
    """Body of `job.picked`: the session takes the job. A second pick by the same session is a duplicate."""

    job_id: JobId
    session: Name


class JobCancellation(WireBody):
    """Body of `job.cancelled`. A repeated `request_id` is the same cancellation."""

    job_id: JobId
    request_id: Name
    reason: Note = ""


class JobSecretRotation(WireBody):
    """Body of `job.secret_rotated`: a new secret, sealed in the same way as that of the registration.

    The previous secret remains valid for `overlap_ms` after the record's append time. A repeated `request_id`
    is the same rotation.
    """

    job_id: JobId
    request_id: Name
    sealed_secret: str
    overlap_ms: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_MS)]


JOB_MODELS: Final[dict[str, type[BaseModel]]] = {
    JOB_EVENT: JobEvent,
    JOB_REGISTERED: JobRegistration,
    JOB_PICKED: JobPick,
    JOB_CANCELLED: JobCancellation,
    JOB_SECRET_ROTATED: JobSecretRotation,
}


def registration_record(
    job_id: str,
    secret: str,
    description: str,
    keyring: Keyring,
    *,
    session: str | None = None,
    broker: BrokerOverlay | None = None,
    request_id: str | None = None,
    notify: list[Notice] | None = None,
    door: str = "cli",
    principal: str = "operator",
) -> OutgoingRecord:
    """Return the record that registers a job, with its secret sealed by `keyring`.

    Args:
        job_id: 8 lower-case hex digits.
        secret: the secret with which the job's events are signed.
        description: the text of the job, at most `DESCRIPTION_LIMIT` characters.
        keyring: the master keys.
        session: the only session that may pick the job. `None` means any.
        broker: the settings of the per-job broker. `None` means the common broker.
        request_id: the id of the request, if it has one.
        notify: the events of which the principal is notified. `None` means the job's end.
        door: the door that appends the record.
        principal: the principal that registers the job.

    Raises:
        pydantic.ValidationError: a value is invalid.
    """
    body = JobRegistration(
        job_id=job_id,
        description=description,
        session=session,
        broker=broker,
        request_id=request_id,
        sealed_secret=keyring.seal(secret.encode("utf-8"), job_secret_purpose(job_id)),
        notify=notify,
    )
    return body.record(JOB_REGISTERED, stream_key(JOB, job_id), door=door, principal=principal)


def cancellation_record(
    job_id: str,
    *,
    reason: str = "",
    request_id: str | None = None,
    door: str = "cli",
    principal: str = "operator",
) -> OutgoingRecord:
    """Return the record that cancels a job. A `request_id` of `None` means a random one.

    Raises:
        pydantic.ValidationError: the job id, the reason or the request id is invalid.
    """
    body = JobCancellation(job_id=job_id, reason=reason, request_id=request_id or str(uuid.uuid4()))
    # The job is part of the identity because one request may cancel several jobs.
    identity = (job_id, body.request_id)
    return body.record(JOB_CANCELLED, stream_key(JOB, job_id), *identity, door=door, principal=principal)


def rotation_record(
    job_id: str,
    secret: str,
    overlap_ms: int,
    keyring: Keyring,
    *,
    request_id: str,
    door: str = "cli",
    principal: str = "operator",
) -> OutgoingRecord:
    """Return the record that rotates a job's secret. The previous one remains valid for `overlap_ms`.

    Raises:
        pydantic.ValidationError: the job id, the request id or the overlap is invalid.
    """
    body = JobSecretRotation(
        job_id=job_id,
        request_id=request_id,
        sealed_secret=keyring.seal(secret.encode("utf-8"), job_secret_purpose(job_id)),
        overlap_ms=overlap_ms,
    )
    identity = (job_id, body.request_id)
    return body.record(JOB_SECRET_ROTATED, stream_key(JOB, job_id), *identity, door=door, principal=principal)


def pick_record(job_id: str, session: str, *, door: str = "http", principal: str) -> OutgoingRecord:
    """Return the record by which a session picks a job.

    Raises:
        pydantic.ValidationError: the job id or the session's name is invalid.
    """
    body, ce_id = JobPick(job_id=job_id, session=session), pick_id(job_id, session)
    return body.record(JOB_PICKED, stream_key(JOB, job_id), ce_id=ce_id, door=door, principal=principal)


def pick_id(job_id: str, session: str) -> str:
    """Return the CloudEvents id of the pick of a job by a session. It depends on these two alone."""
    return content_id(JOB_PICKED.encode(), job_id.encode("ascii"), session.encode("utf-8"))
