"""The request and answer bodies of jobs (JE-10 to JE-13)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, Field, SecretStr, create_model

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
from schemas.streams.job.job_registry import DESCRIPTION_LIMIT, BrokerOverlay, JobRow, Notice
from schemas.wire.wire_body import Note, Printable

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
