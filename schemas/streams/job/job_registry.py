"""The records that register, assign and cancel a job (JE-10 to JE-12), and give it a new secret: wire
models, and how a door makes them.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.fold.life_cycles import CANCELLED, COMPLETED, ERROR, PENDING, RUNNING, terminal_states
from schemas.fold.view_rows import Moment, Row
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.job.job_event import JOB_EVENT, JobEvent
from schemas.wire.ids import JOB, stream_key
from schemas.wire.record import OutgoingRecord, content_id
from schemas.wire.strict_json import canonical
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
# What who registered a job may want to be told of, in its mailbox.
PERMISSION: Final = "permission"
END: Final = "end"
Notice = Literal["permission", "end"]


class JobRow(Row, frozen=True, gc=False):
    """A row of `registry_jobs`. `session_wanted` may alone pick it; `session` has it.
    `ended_by`: CloudEvents id of the record that ended the job, the cause of what follows from it. `notify`:
    what who registered it wants to be told of; None: of its end. `secret_rotations`: how often it was given a
    new secret, None: never; until `old_secret_ends_at` the one before it signs, too.
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
    """Broker settings of one job, over those of the environment (JE-13). The password is sealed."""

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
    """Body of `job.registered`. `sealed_secret` opens for `job-secret/<job_id>` only. `request_id`: of the
    request that made the job, of which its id has but the first 32 bits. `notify`: None is as `["end"]`.
    """

    job_id: JobId
    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)]
    session: Name | None = None
    broker: BrokerOverlay | None = None
    request_id: Name | None = None
    sealed_secret: str
    notify: Annotated[list[Notice], Field(max_length=2)] | None = None


class JobPick(WireBody):
    """Body of `job.picked`: the session takes the job. The same session again is the same pick."""

    job_id: JobId
    session: Name


class JobCancellation(WireBody):
    """Body of `job.cancelled`. The same `request_id` again is the same cancellation."""

    job_id: JobId
    request_id: Name
    reason: Note = ""


class JobSecretRotation(WireBody):
    """Body of `job.secret_rotated`: a new secret, sealed as at the registration. The one before it signs for
    `overlap_ms` more, by the log's clock. The same `request_id` again is the same rotation.
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
    """The record that registers a job. Raises pydantic.ValidationError for a bad description or session."""
    body = JobRegistration(
        job_id=job_id,
        description=description,
        session=session,
        broker=broker,
        request_id=request_id,
        sealed_secret=keyring.seal(secret.encode("utf-8"), job_secret_purpose(job_id)),
        notify=notify,
    )
    said: dict[str, Any] = body.model_dump(mode="json")
    if notify is None:
        # It came later, and must not make a repeated registration another one.
        del said["notify"]
    value = canonical(said)
    return OutgoingRecord(
        stream=stream_key(JOB, job_id),
        ce_id=content_id(JOB_REGISTERED.encode(), value),
        door=door,
        principal=principal,
        type=JOB_REGISTERED,
        value=value,
    )


def cancellation_record(
    job_id: str,
    *,
    reason: str = "",
    request_id: str | None = None,
    door: str = "cli",
    principal: str = "operator",
) -> OutgoingRecord:
    """The record that cancels a job. Raises pydantic.ValidationError for a bad reason or request id."""
    body = JobCancellation(job_id=job_id, reason=reason, request_id=request_id or str(uuid.uuid4()))
    value = canonical(body.model_dump(mode="json"))
    # Without the job, two jobs that one request cancels would share the id of what ended them.
    identity = (f"{door}/{principal}", job_id, body.request_id)
    return OutgoingRecord(
        stream=stream_key(JOB, job_id),
        ce_id=content_id(JOB_CANCELLED.encode(), *(part.encode() for part in identity)),
        door=door,
        principal=principal,
        type=JOB_CANCELLED,
        value=value,
    )


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
    """The record that gives a job a new secret. Raises pydantic.ValidationError for a bad overlap or id."""
    body = JobSecretRotation(
        job_id=job_id,
        request_id=request_id,
        sealed_secret=keyring.seal(secret.encode("utf-8"), job_secret_purpose(job_id)),
        overlap_ms=overlap_ms,
    )
    identity = (f"{door}/{principal}", job_id, body.request_id)
    return OutgoingRecord(
        stream=stream_key(JOB, job_id),
        ce_id=content_id(JOB_SECRET_ROTATED.encode(), *(part.encode() for part in identity)),
        door=door,
        principal=principal,
        type=JOB_SECRET_ROTATED,
        value=canonical(body.model_dump(mode="json")),
    )


def pick_record(job_id: str, session: str, *, door: str = "http", principal: str) -> OutgoingRecord:
    """The record by which a session takes a job. Raises pydantic.ValidationError for what is no name."""
    value = canonical(JobPick(job_id=job_id, session=session).model_dump(mode="json"))
    return OutgoingRecord(
        stream=stream_key(JOB, job_id),
        ce_id=pick_id(job_id, session),
        door=door,
        principal=principal,
        type=JOB_PICKED,
        value=value,
    )


def pick_id(job_id: str, session: str) -> str:
    """The CloudEvents id of the pick of a job by a session: there is one such pick."""
    return content_id(JOB_PICKED.encode(), job_id.encode("ascii"), session.encode("utf-8"))
