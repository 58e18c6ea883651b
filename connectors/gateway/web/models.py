"""The bodies that the gateway takes and gives, as its OpenAPI page shows them. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, create_model

from schemas.fold.view_rows import JobRow, MessageRow, MqttAgentRow, SessionRow
from schemas.streams.job.job_registry import DESCRIPTION_LIMIT, BrokerOverlay, Notice
from schemas.streams.session.session_registry import STOP
from schemas.wire.ids import NAME_LIMIT
from schemas.wire.wire_body import OVERLAP_LIMIT_MS, Name, Note, Printable

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
JOB_ID_PATTERN: Final = r"^[0-9a-f]{8}$"
LIST_LIMIT: Final = 1000
OVERLAP_LIMIT_S: Final = OVERLAP_LIMIT_MS // 1000
NamedThing = Annotated[Name, Field(max_length=NAME_LIMIT)]
"""A name."""
# As in schemas, with an end of pattern that every reader of the OpenAPI page understands.
JobId = Annotated[str, Field(pattern=JOB_ID_PATTERN)]
"""A job's id."""
Handle = Annotated[str, Field(max_length=256, pattern=r"^(tmux|process)/[A-Za-z0-9._/-]+$")]
"""What runs on a host, for a session."""
_Text = Annotated[Printable, Field(min_length=1, max_length=255)]
_File = Annotated[Printable, Field(min_length=1, max_length=1024)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _whole(number: object) -> object:
    """1883.0 is an integer in JSON schema, and so it is here."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


class NoFields(_Request):
    """An empty object."""


class BrokerRequest(_Request):
    """Broker settings of one job, over those of the environment (JE-13)."""

    host: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")] | None = None
    port: Annotated[int, Field(ge=1, le=65535), BeforeValidator(_whole)] | None = None
    tls: bool | None = None
    ca_certs: _File | None = None
    certfile: _File | None = None
    keyfile: _File | None = None
    username: _Text | None = None
    password: Annotated[SecretStr, Field(max_length=1024)] | None = None


class JobRequest(_Request):
    """A job to be done; `session`: only this one may pick it. `notify`: what who registers it is told of in its
    mailbox, by default the end.
    """

    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)]
    session: NamedThing | None = None
    broker: BrokerRequest | None = None
    notify: Annotated[list[Notice], Field(max_length=2)] | None = None


class PickRequest(_Request):
    """Who wants a job, or is to have it."""

    session: NamedThing


class CancelRequest(_Request):
    """Why a job is cancelled."""

    reason: Note = ""


class RotationRequest(_Request):
    """A new secret for a job. The one it has is good for `overlap_s` more."""

    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_S), BeforeValidator(_whole)] = 3600


class SessionRequest(_Request):
    """A session that exists from now on."""

    session: NamedThing
    description: Note = ""
    host: NamedThing | None = None
    handle: Handle | None = None
    for_job: JobId | None = None


class StopRequest(_Request):
    """How and why a session ends."""

    mode: Literal["stop", "hard", "soft"] = STOP
    reason: Note = ""
    capture_id: NamedThing | None = None
    graceful: bool = False


class ResumeRequest(_Request):
    """Where a session runs again."""

    host: NamedThing | None = None
    handle: Handle | None = None


class PrincipalRequest(_Request):
    """Somebody who gets a token."""

    principal: NamedThing
    role: Literal["operator", "delegator", "worker", "viewer"]


class JobFilter(BaseModel):
    """Which jobs to list: all that fit every filter given, newest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Literal["pending", "running", "completed", "error", "cancelled"] | None = None
    session: NamedThing | None = None
    older_than_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)] | None = None
    newer_than_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)] | None = None
    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT)] = 100


class SessionFilter(BaseModel):
    """Which sessions to list, newest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Literal["running", "stopped", "archived", "terminated"] | None = None
    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT)] = LIST_LIMIT


class MailboxFilter(BaseModel):
    """Which of a mailbox's messages to show: the newest, or the oldest of those that are pending. `after`: the
    id of the pending message that was the last of the page before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT)] = 100
    pending: bool = False
    after: NamedThing | None = None


class EventFilter(BaseModel):
    """Which settled records to follow: those that fit every filter given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stream: (
        Annotated[str, Field(max_length=2 * NAME_LIMIT + 20, pattern=r"^[a-z]+/[A-Za-z0-9._/-]+$")] | None
    ) = None
    kind: Annotated[str, Field(pattern=r"^[a-z]+$", max_length=20)] | None = None
    type: Annotated[str, Field(pattern=r"^[a-z_.]+$", max_length=40)] | None = None
    verdict: Literal["accepted", "duplicate", "rejected"] | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorAnswer(_Answer):
    """Every error. `reason` is a code, `message` says it in words."""

    reason: str
    message: str


ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request was refused; the reason says why."},
    "5XX": {"model": ErrorAnswer, "description": "Not the caller's fault; 503 says when to come again."},
}


class RegisteredAnswer(_Answer):
    """A registered job. The secret is told here, and again for a retry with the same idempotency key."""

    job_id: JobId
    secret: str
    position: Annotated[list[int], Field(min_length=2, max_length=2)]


class BrokerAnswer(_Answer):
    """The broker of a picked job, the password opened."""

    host: str | None = None
    port: int | None = None
    tls: bool | None = None
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    username: str | None = None
    password: str | None = None


class GrantAnswer(_Answer):
    """A picked job."""

    job_id: JobId
    description: str
    broker: BrokerAnswer | None
    secret: str


class JobChangedAnswer(_Answer):
    """A job that was assigned or cancelled."""

    job_id: JobId
    status: str
    verdict: str


class RotatedAnswer(RegisteredAnswer):
    """A job's new secret, told here, again for a retry with the same idempotency key until the next rotation,
    and to the session that picks the job again. `mqtt_user`: its holder at the backbone's own MQTT broker.
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
    return create_model(name, __base__=_Answer, __doc__=f"A row of this kind: {name}.", **fields)


JobAnswer: Final = _row_answer("JobAnswer", JobRow)
JobShownAnswer: Final = create_model(
    "JobShownAnswer",
    __base__=JobAnswer,
    __doc__="A row of a job, and its broker overlay if it has one.",
    broker=(BrokerOverlay | None, ...),
)
SessionAnswer: Final = _row_answer("SessionAnswer", SessionRow)
MqttAgentAnswer: Final = _row_answer("MqttAgentAnswer", MqttAgentRow)
MessageAnswer: Final = create_model(
    "MessageAnswer",
    __base__=_row_answer("MessageAnswer", MessageRow),
    __doc__="A message and where it stands.",
    body=(str | None, ...),
    content_type=(str | None, ...),
)


class PrincipalAnswer(_Answer):
    """A principal; of its token nothing is shown."""

    principal: str
    role: str
    status: str
    added_by: str
    added_at: AwareDatetime
    revoked_at: AwareDatetime | None


class TokenAnswer(_Answer):
    """A new principal. The token is told here, and again for a retry with the same idempotency key."""

    principal: str
    role: str
    token: str


class JobsAnswer(_Answer):
    """The newest jobs that fit, and how many fit."""

    jobs: list[JobAnswer]  # type: ignore[valid-type]
    total: int


class SessionsAnswer(_Answer):
    """The newest sessions that fit, and how many fit."""

    sessions: list[SessionAnswer]  # type: ignore[valid-type]
    total: int


class PrincipalsAnswer(_Answer):
    """All principals, by name."""

    principals: list[PrincipalAnswer]


class MessagesAnswer(_Answer):
    """The newest messages of a mailbox, or the oldest that are pending; the oldest of them first, and how many
    there are. Nothing is taken.
    """

    messages: list[MessageAnswer]  # type: ignore[valid-type]
    total: int


class BrokersAnswer(_Answer):
    """The distinct broker overlays of live jobs, as canonical JSON with sealed passwords."""

    brokers: list[str]


class HealthAnswer(_Answer):
    """The gateway answers."""

    status: Literal["ok", "ready"]


class ReadyAnswer(HealthAnswer):
    """The gateway can do its work. `lag`: records behind the log's end, by partition."""

    lag: dict[str, int]
