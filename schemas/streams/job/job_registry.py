"""The records that register, pick and cancel a job (JE-10 to JE-12) and rotate its secret; its events (JE-02).

This module has their wire models, and the entries of the stream `job/<id>`, with the check of an event's
signature against the job's secrets. The model of the event and `trunkline_agent.wire.job_event.event_fault`,
which the fold uses, decide alike; a property test compares them.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.fold.entries import StructEntries
from schemas.fold.memories import RequestChunk, RequestMemory, SeqChunk, SeqMemory
from schemas.fold.stream_kind import CANCELLED, COMPLETED, ERROR, PENDING, RUNNING, terminal_states
from schemas.fold.view_rows import Moment, Row
from schemas.keys.sealing import Keyring
from schemas.wire.wire_body import OVERLAP_LIMIT_MS, JobId, Name, Note, Printable, UtcTime, WireBody, models_of
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.job_event import DETAIL_LIMIT, has_control_characters
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


ENTRY_VERSION: Final = 1


class JobEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The entry `job` of a job's stream: its registration and its secrets.

    All secrets are sealed for the purpose `job-secret/<job id>`. Times are in microseconds since 1970 UTC.

    Attributes:
        session: the only session that may pick the job. `None` means any.
        broker: the settings of the per-job broker as JSON. `None` means the common broker.
        digest: the digest of the registration's content, to recognise a repeated registration.
        notify: the events of which the principal that registered the job is notified. `None` means its end.
        sealed_secret: the current secret.
        old_secret: the secret before the last rotation, or `None` before the first rotation. It is valid in
            records that were appended before `old_until`.
        first_secret: the secret of the registration, or `None` before the first rotation. The digests of events
            are made with it (`event_digest`).
        rotations: how often the secret was rotated.
    """

    version: int
    description: str
    session: str | None
    broker: str | None
    sealed_secret: str
    registered_by: str
    registered_at: int
    digest: bytes
    request_id: str | None = None
    notify: list[str] | None = None
    old_secret: str | None = None
    old_until: int | None = None
    first_secret: str | None = None
    rotations: int = 0


class RotationsEntry(msgspec.Struct, array_like=True, gc=False):
    """The entry `rotations` of a job's stream: a memory of the requests that rotated the job's secret."""

    version: int
    requests: RequestMemory


class ProgressEntry(msgspec.Struct, array_like=True, gc=False):
    """The entry `progress` of a job's stream: its status, accepted seqs, newest event and times.

    `session` is the session that picked the job, or `None`. `cancelled_by` is the CloudEvents id and the
    content digest of the record that cancelled the job. `ended_by` is the CloudEvents id of the record that
    ended it. Times are in microseconds since 1970 UTC.
    """

    version: int
    status: str
    seqs: SeqMemory
    started_at: int | None = None
    ended_at: int | None = None
    last_event: str | None = None
    last_detail: str | None = None
    events: int = 0
    cancelled_by: tuple[str, bytes] | None = None
    session: str | None = None
    picked_at: int | None = None
    ended_by: str | None = None


# Every event of a job reads this entry, which only a registration or a rotation writes. So its value is cached.
_decode_job: Final = lru_cache(maxsize=20_000)(msgspec.msgpack.Decoder(JobEntry).decode)
JOB_ENTRY: Final = StructEntries("job", JobEntry, _decode_job)
PROGRESS: Final = StructEntries("progress", ProgressEntry)
SEQS: Final = StructEntries("seqs/", SeqChunk)
ROTATIONS: Final = StructEntries("rotations", RotationsEntry)
OLDER_ROTATIONS: Final = StructEntries("rotations/", RequestChunk)


def is_signed(
    content: bytes, signature: object, logged_at_us: int, job_id: str, job: JobEntry, keyring: Keyring
) -> bool:
    """Return whether a job event is signed with the job's secret.

    After a rotation, the previous secret is valid, too, in records that were appended before `job.old_until`.

    Args:
        content: the bytes of the event that are signed (`signed_bytes`).
        signature: the value of `data.hmac_sig`, which may be anything.
        logged_at_us: the append time of the event's record in microseconds since 1970 UTC.
        job_id: the id of the job.
        job: the registration of the job, with its sealed secrets.
        keyring: the master keys that open the secrets.

    Raises:
        UnsealError: no master key opens a secret.
    """
    if keyring.job_signer(job.sealed_secret, job_id).verifies(content, signature):
        return True
    if job.old_secret is None or job.old_until is None or logged_at_us >= job.old_until:
        return False
    return keyring.job_signer(job.old_secret, job_id).verifies(content, signature)


def event_digest(content: bytes, signature: str, job_id: str, job: JobEntry, keyring: Keyring) -> bytes:
    """Return a digest (16 bytes) of a job event's content, by which the fold recognises a repeated event.

    It is the start of the event's signature with the job's first secret. An event that is signed again with a
    new secret after a rotation therefore has the same digest.

    Args:
        content: the bytes of the event that are signed (`signed_bytes`).
        signature: the signature of the event in hex, which `is_signed` has verified.
        job_id: the id of the job.
        job: the registration of the job, with its sealed secrets.
        keyring: the master keys that open the secrets.

    Raises:
        UnsealError: no master key opens the first secret.
    """
    if job.first_secret is not None:
        signature = keyring.job_signer(job.first_secret, job_id).hexdigest(content)
    return bytes.fromhex(signature[:32])
