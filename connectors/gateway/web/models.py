"""The base classes of request and answer bodies, and the bodies of jobs, sessions and principals.

The OpenAPI page shows these models. A request with an unknown field is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, create_model

from schemas.streams.agents.mqtt_agents import MqttAgentRow
from schemas.streams.job.job_registry import DESCRIPTION_LIMIT, BrokerOverlay, JobRow, Notice
from schemas.streams.mailboxes.message import MessageRow
from schemas.streams.session.session_registry import STOP, SessionRow
from schemas.wire.ids import NAME_LIMIT
from schemas.wire.wire_body import OVERLAP_LIMIT_MS, Name, Note, Printable

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
JOB_ID_PATTERN: Final = r"^[0-9a-f]{8}$"
LIST_LIMIT: Final = 1000
OVERLAP_LIMIT_S: Final = OVERLAP_LIMIT_MS // 1000
NamedThing = Annotated[Name, Field(max_length=NAME_LIMIT)]
"""A name."""
ListLimit = Annotated[int, Field(ge=1, le=LIST_LIMIT)]
"""The largest number of items in an answer."""
# The same pattern as in schemas, with `$` at its end, which every reader of an OpenAPI page understands.
JobId = Annotated[str, Field(pattern=JOB_ID_PATTERN)]
"""The id of a job."""
Handle = Annotated[str, Field(max_length=256, pattern=r"^(tmux|process)/[A-Za-z0-9._/-]+$")]
"""The name of a session's process on its host."""
_Text = Annotated[Printable, Field(min_length=1, max_length=255)]
_File = Annotated[Printable, Field(min_length=1, max_length=1024)]


class RequestBody(BaseModel):
    """The base class of request bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class AnswerBody(BaseModel):
    """The base class of answer bodies."""

    model_config = ConfigDict(extra="forbid")


class QueryFilter(BaseModel):
    """The base class of query parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _whole(number: object) -> object:
    return int(number) if isinstance(number, float) and number.is_integer() else number


# JSON Schema counts 1883.0 as an integer, so the gateway does, too.
WHOLE: Final = BeforeValidator(_whole)


class NoFields(RequestBody):
    """An empty JSON object."""


class BrokerRequest(RequestBody):
    """The broker settings of one job, which override those of the environment (JE-13)."""

    host: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")] | None = None
    port: Annotated[int, Field(ge=1, le=65535), WHOLE] | None = None
    tls: bool | None = None
    ca_certs: _File | None = None
    certfile: _File | None = None
    keyfile: _File | None = None
    username: _Text | None = None
    password: Annotated[SecretStr, Field(max_length=1024)] | None = None


class JobRequest(RequestBody):
    """A job to register.

    `session`: the only session that may pick the job; null for any. `notify`: the events that the registering
    principal gets a message about, by default the end of the job.
    """

    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)]
    session: NamedThing | None = None
    broker: BrokerRequest | None = None
    notify: Annotated[list[Notice], Field(max_length=2)] | None = None


class PickRequest(RequestBody):
    """The session that picks a job, or that a job is assigned to."""

    session: NamedThing


class CancelRequest(RequestBody):
    """The reason for cancelling a job."""

    reason: Note = ""


class EventAnswer(AnswerBody):
    """The receipt of a job's event, with the fields of the receipt over MQTT.

    `ce_id`: the id of its record. `seq`: its number within the job. `position`: partition and offset of its
    record. `status`: the state of the job after it.
    """

    ce_id: str
    seq: int | None
    verdict: Literal["accepted", "duplicate"]
    reason: None
    position: list[int]
    status: str | None


class RotationRequest(RequestBody):
    """A rotation of a job's secret. The present secret stays valid for `overlap_s` seconds."""

    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_S), WHOLE] = 3600


class SessionRequest(RequestBody):
    """A session to create."""

    session: NamedThing
    description: Note = ""
    host: NamedThing | None = None
    handle: Handle | None = None
    for_job: JobId | None = None


class StopRequest(RequestBody):
    """The way a session ends, and the reason."""

    mode: Literal["stop", "hard", "soft"] = STOP
    reason: Note = ""
    capture_id: NamedThing | None = None
    graceful: bool = False


class ResumeRequest(RequestBody):
    """The place where a session runs again."""

    host: NamedThing | None = None
    handle: Handle | None = None


class PrincipalRequest(RequestBody):
    """A principal to add. It gets a token."""

    principal: NamedThing
    role: Literal["operator", "delegator", "worker", "viewer"]


class JobFilter(QueryFilter):
    """The jobs to list: those that match every filter, newest first."""

    state: Literal["pending", "running", "completed", "error", "cancelled"] | None = None
    session: NamedThing | None = None
    older_than_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)] | None = None
    newer_than_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)] | None = None
    limit: ListLimit = 100


class SessionFilter(QueryFilter):
    """The sessions to list, newest first."""

    state: Literal["running", "stopped", "archived", "terminated"] | None = None
    limit: ListLimit = LIST_LIMIT


class MailboxFilter(QueryFilter):
    """The messages to show: the newest, or with `pending` the oldest pending ones.

    `after`: the id of the last message of the previous page of pending messages; null for the first page.
    `status`: only messages with this status; null for all.
    """

    limit: ListLimit = 100
    pending: bool = False
    status: Literal["unread", "leased", "claimed", "read", "expired", "cleared", "dead"] | None = None
    after: NamedThing | None = None


class EventFilter(QueryFilter):
    """The settled records to stream: the records that match every filter."""

    stream: (
        Annotated[str, Field(max_length=2 * NAME_LIMIT + 20, pattern=r"^[a-z]+/[A-Za-z0-9._/-]+$")] | None
    ) = None
    kind: Annotated[str, Field(pattern=r"^[a-z]+$", max_length=20)] | None = None
    type: Annotated[str, Field(pattern=r"^[a-z_.]+$", max_length=40)] | None = None
    verdict: Literal["accepted", "duplicate", "rejected"] | None = None


class ErrorAnswer(AnswerBody):
    """An error. `reason` is a stable code, `message` explains it."""

    reason: str
    message: str


ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request was refused; `reason` is the code."},
    "5XX": {"model": ErrorAnswer, "description": "The gateway failed; 503 has a `Retry-After` header."},
}


class RegisteredAnswer(AnswerBody):
    """A registered job. A retry with the same idempotency key gets the same secret; nothing else shows it."""

    job_id: JobId
    secret: str
    position: Annotated[list[int], Field(min_length=2, max_length=2)]


class BrokerAnswer(AnswerBody):
    """The broker of a picked job, with its password in clear."""

    host: str | None = None
    port: int | None = None
    tls: bool | None = None
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    username: str | None = None
    password: str | None = None


class GrantAnswer(AnswerBody):
    """A job that a session has picked, with the secret that signs its events."""

    job_id: JobId
    description: str
    broker: BrokerAnswer | None
    secret: str


class JobChangedAnswer(AnswerBody):
    """A job that was assigned or cancelled."""

    job_id: JobId
    status: str
    verdict: str


class RotatedAnswer(RegisteredAnswer):
    """The new secret of a job.

    A retry with the same idempotency key repeats it until the next rotation, and the session gets it when it
    picks the job again. `mqtt_user`: the user name for the secret at the MQTT broker of the backbone.
    """

    mqtt_user: str
    old_secret_ends_at: AwareDatetime


def _row_answer(name: str, row_type: type[msgspec.Struct]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(row_type):
        kind = field.type
        if field.name.endswith("_at") and kind is not str and kind != (str | None):
            is_optional = type(None) in getattr(kind, "__args__", ())
            kind = AwareDatetime | None if is_optional else AwareDatetime
        fields[field.name] = (kind, ...)
    return create_model(name, __base__=AnswerBody, __doc__=f"The columns of a registry row ({name}).", **fields)


JobAnswer: Final = _row_answer("JobAnswer", JobRow)
JobShownAnswer: Final = create_model(
    "JobShownAnswer",
    __base__=JobAnswer,
    __doc__="A job, with its broker settings if it has any.",
    broker=(BrokerOverlay | None, ...),
)
SessionAnswer: Final = _row_answer("SessionAnswer", SessionRow)
MqttAgentAnswer: Final = _row_answer("MqttAgentAnswer", MqttAgentRow)
MessageAnswer: Final = create_model(
    "MessageAnswer",
    __base__=_row_answer("MessageAnswer", MessageRow),
    __doc__="A message and its state.",
    body=(str | None, ...),
    content_type=(str | None, ...),
)


class PrincipalAnswer(AnswerBody):
    """A principal, without its token."""

    principal: str
    role: str
    status: str
    added_by: str
    added_at: AwareDatetime
    revoked_at: AwareDatetime | None


class TokenAnswer(AnswerBody):
    """A new principal. A retry with the same idempotency key gets the same token; nothing else shows it."""

    principal: str
    role: str
    token: str


class JobsAnswer(AnswerBody):
    """The newest matching jobs, and the number of all matching jobs."""

    jobs: list[JobAnswer]  # type: ignore[valid-type]
    total: int


class SessionsAnswer(AnswerBody):
    """The newest matching sessions, and the number of all matching sessions."""

    sessions: list[SessionAnswer]  # type: ignore[valid-type]
    total: int


class PrincipalsAnswer(AnswerBody):
    """All principals, sorted by name."""

    principals: list[PrincipalAnswer]


class MessagesAnswer(AnswerBody):
    """The messages of a mailbox, oldest first, and how many there are. Reading does not take them."""

    messages: list[MessageAnswer]  # type: ignore[valid-type]
    total: int


class BrokersAnswer(AnswerBody):
    """The distinct broker settings of jobs that have not ended, as canonical JSON with sealed passwords."""

    brokers: list[str]


class HealthAnswer(AnswerBody):
    """The health of the gateway."""

    status: Literal["ok", "ready"]


class ReadyAnswer(HealthAnswer):
    """The gateway can do its work. `lag`: records behind the end of the log, by partition."""

    lag: dict[str, int]
