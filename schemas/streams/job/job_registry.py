"""The records that register, pick and cancel a job (JE-10 to JE-12) and rotate its secret; its events (JE-02).

This module has their wire models. That of the event and `trunkline_agent.wire.job_event.event_fault`, which the
fold uses, decide alike; a property test compares them.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.fold.life_cycles import CANCELLED, COMPLETED, ERROR, PENDING, RUNNING, terminal_states
from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import OVERLAP_LIMIT_MS, JobId, Name, Note, Printable, UtcTime, WireBody, models_of
from trunkline_agent.wire.content_id import content_id
from trunkline_agent.wire.field_checks import has_control_characters
from trunkline_agent.wire.job_event import DETAIL_LIMIT
from trunkline_agent.wire.strict_json import INT_MAX

JOB_EVENT: Final = "job.event"

# The check below as a regular expression, for readers of the JSON schema.
_PRINTABLE: Final = {"pattern": r"^[^\x00-\x1f\x7f-\x9f]*$"}


def _printable(text: str) -> str:
    if has_control_characters(text):
        raise ValueError("holds a control character")
    return text


class JobEvent(BaseModel):
    """Body of `job.event`: one event of a job, as an agent publishes it.

    Unknown keys are kept and are part of the signed bytes. The signature is in `data.hmac_sig`.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    # Literal[1] would accept `true`.
    schema_version: Annotated[int, Field(ge=1, le=1, json_schema_extra={"const": 1})]
    """Version of the form: 1."""
    seq: Annotated[int, Field(ge=1, le=INT_MAX)]
    """Number of the event within its job, from 1."""
    job_id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}\z", json_schema_extra={"pattern": "^[0-9a-f]{8}$"})]
    """Id of the job, 8 hex digits."""
    event: Literal["started", "progress", "permission_required", "completed", "error"]
    """Kind of the event. `completed` and `error` end the job."""
    timestamp: UtcTime
    """Time of the event by the sender's clock, in UTC, such as `2026-01-31T12:00:00Z`."""
    detail: Annotated[
        str, Field(max_length=DETAIL_LIMIT, json_schema_extra=_PRINTABLE), AfterValidator(_printable)
    ]
    """Remark for people. A path, a secret or `NAME=value` in it is masked."""
    data: dict[str, Any]
    """Anything, with the signature in `hmac_sig`."""


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
    """A row of `registry_jobs`: a job and its progress."""

    VIEW: ClassVar = REGISTRY_JOBS
    KEY: ClassVar = ("job_id",)
    ORDER: ClassVar = "registered_at"

    job_id: str
    """Id of the job, 8 hex digits."""
    status: str
    """`pending`, `running`, `completed`, `error` or `cancelled`."""
    description: str
    """Description by the principal that registered the job."""
    session_wanted: str | None
    """Only session that may pick the job. Null: any session."""
    session: str | None
    """Session that picked the job. Null: none yet."""
    registered_by: str
    """Principal that registered the job."""
    registered_at: Moment
    """Time of the registration."""
    picked_at: Moment | None
    """Time at which the session picked the job."""
    started_at: Moment | None
    """Time of the job's first accepted event. Null: none yet."""
    ended_at: Moment | None
    """Time at which the job ended. Null: it has not."""
    ended_by: str | None
    """CloudEvents id of the record that ended the job."""
    last_seq: int
    """Highest seq of an accepted event. 0: none yet."""
    last_event: str | None
    """Kind of the event with the highest seq."""
    last_detail: str | None
    """Field `detail` of the event with the highest seq, masked if it was unsafe."""
    events: int
    """Number of accepted events."""
    notify: list[str] | None = None
    """Events of which the principal that registered the job is notified. Null: the job's end."""
    secret_rotations: int | None = None
    """How often the job's secret was rotated. Null: never."""
    old_secret_ends_at: Moment | None = None
    """Time until which the secret before the last rotation is valid, too."""

    @property
    def is_live(self) -> bool:
        """True if the job has not ended."""
        return self.status not in JOB_TERMINAL

    @property
    def lists(self) -> tuple[str, ...]:
        """The lists of the row's status, and of status and session. A pending job counts as its session's."""
        session = self.session or self.session_wanted
        return (self.status,) if session is None else (self.status, f"{self.status}/{session}")


class BrokerOverlay(BaseModel):
    """The settings of a per-job MQTT broker (JE-13).

    A field that is `None` has the value of the common broker, from the settings of the program that connects.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    host: str | None = None
    """Name or address of the broker."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
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
    sealed_password: str | None = None
    """Password at the broker, sealed under a master key."""


def broker_digest(overlay: str) -> str:
    """Return the name of a per-job broker in lists: the SHA-256 of its settings, in hex."""
    return hashlib.sha256(overlay.encode()).hexdigest()


class JobRegistration(WireBody):
    """Body of `job.registered`: a new job.

    Attributes:
        session: the only session that may pick the job. `None` means any.
        broker: the settings of the per-job broker. `None` means the common broker.
        request_id: the id of the request that registered the job. `job_id` may be derived from its first 32
            bits.
        sealed_secret: the secret with which the job's events are signed, sealed for `job-secret/<job_id>`.
        notify: the events of which the principal that registered the job is notified. `None` means `["end"]`.
    """

    TYPE: ClassVar = JOB_REGISTERED
    STREAM: ClassVar = "job/{job_id}"

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
    """Body of `job.picked`: a session takes the job.

    A second pick by the same session is a duplicate, and a pick by another one is rejected.
    """

    TYPE: ClassVar = JOB_PICKED
    STREAM: ClassVar = "job/{job_id}"
    IDENTITY: ClassVar = ("{job_id}", "{session}")

    job_id: JobId
    session: Name


class JobCancellation(WireBody):
    """Body of `job.cancelled`: the job ends now. The same record with the same `request_id` is a duplicate."""

    TYPE: ClassVar = JOB_CANCELLED
    STREAM: ClassVar = "job/{job_id}"
    # The job is part of the identity because one request may cancel several jobs.
    IDENTITY: ClassVar = ("{origin}", "{job_id}", "{request_id}")

    job_id: JobId
    request_id: Name
    reason: Note = ""


class JobSecretRotation(WireBody):
    """Body of `job.secret_rotated`: the job gets a new secret, sealed for the purpose `job-secret/<job_id>`.

    The previous secret remains valid for `overlap_ms` after the record's append time. The same record with the
    same `request_id` is a duplicate.
    """

    TYPE: ClassVar = JOB_SECRET_ROTATED
    STREAM: ClassVar = "job/{job_id}"
    IDENTITY: ClassVar = ("{origin}", "{job_id}", "{request_id}")

    job_id: JobId
    request_id: Name
    sealed_secret: str
    overlap_ms: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_MS)]


JOB_MODELS: Final[dict[str, type[BaseModel]]] = {
    JOB_EVENT: JobEvent,
    **models_of(JobRegistration, JobPick, JobCancellation, JobSecretRotation),
}


def pick_id(job_id: str, session: str) -> str:
    """Return the CloudEvents id of the record by which a session picks a job.

    It is derived from the job's id and the session's name alone, so a repeated pick has the same id.
    """
    return content_id(JOB_PICKED.encode(), job_id.encode("ascii"), session.encode("utf-8"))
