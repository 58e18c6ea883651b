"""The bodies of the hub's routes for agents, tasks, tokens and messages (HH-11), as its OpenAPI page shows
them. Unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from connectors.gateway.web.models import LIST_LIMIT, NamedThing
from schemas.streams.mailboxes.mailbox_requests import CLAIM_LIMIT, LIMIT_MOST
from schemas.streams.principal.principals import HUB
from schemas.streams.task.task_registry import ERROR_LIMIT, RESULT_LIMIT_BYTES, result_text
from schemas.wire.wire_body import TASK_TEXT_LIMIT, Note, Printable

TASK_STATES = Literal["pending", "running", "completed", "failed", "cancelled"]
_KIND_LIMIT = 128


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Filter(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _result_within_limit(result: Any) -> Any:
    size = len(result_text(result).encode("utf-8"))
    if size > RESULT_LIMIT_BYTES:
        raise ValueError(
            f"has {size} bytes as text, and may have {RESULT_LIMIT_BYTES}; send what is long as messages"
        )
    return result


class TaskRequest(_Request):
    """A task for an agent."""

    description: Annotated[Printable, Field(max_length=TASK_TEXT_LIMIT)]
    agent_name: NamedThing


class TaskCompletionRequest(_Request):
    """The result of a task. `result`: any JSON, at most 64 KiB as text."""

    result: Annotated[Any, AfterValidator(_result_within_limit)] = ""


class TaskFailureRequest(_Request):
    """Why a task failed."""

    error: Annotated[Printable, Field(max_length=ERROR_LIMIT)]


class TaskCancelRequest(_Request):
    """Why a task is cancelled, or a token revoked."""

    reason: Note = ""


class TaskFilter(_Filter):
    """Which tasks to list: all that fit every filter given, newest first."""

    status: TASK_STATES | None = None
    agent_name: NamedThing | None = None
    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT)] = 100


class TaskLimit(_Filter):
    """How many of the newest to list."""

    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT)] = 100


class TokenFilter(_Filter):
    """Which tokens to list, newest first."""

    status: Literal["active", "revoked", "expired"] | None = None
    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT)] = 100


class AuditFilter(_Filter):
    """How many of the newest entries to show; by default as many as the setting `gateway.audit_messages`."""

    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT)] | None = None


class DrainFilter(_Filter):
    """How many messages to take at most."""

    limit: Annotated[int, Field(ge=1, le=LIMIT_MOST)] = CLAIM_LIMIT


class MessageEnvelope(_Request):
    """A message. `recipient`: the name of a mailbox, the hub's by default. `payload`: any JSON."""

    recipient: NamedThing = HUB
    type: Annotated[Printable, Field(max_length=_KIND_LIMIT)]
    payload: Any = {}


class DeliveredAnswer(_Answer):
    """The message lies in its recipient's mailbox."""

    delivered: bool
    message_id: str


class MessageAnswer(_Answer):
    """A message as its recipient gets it."""

    id: str
    timestamp: AwareDatetime
    sender: str
    recipient: str
    type: str
    payload: Any


class DrainedAnswer(_Answer):
    """What was taken out of the caller's mailbox, the most urgent first, and how many are left."""

    messages: list[MessageAnswer]
    left: int


class ReadRequest(_Request):
    """Messages of the caller's own mailbox to mark as read. An empty list marks none."""

    message_ids: Annotated[list[NamedThing], Field(max_length=LIMIT_MOST)]


class ReadAnswer(_Answer):
    """The ids of the request, each once. `read`: read now, by this request or before it. `not_marked`: leased
    by another door, or final meanwhile. `unknown`: not in the caller's mailbox, or expired.
    """

    read: list[str]
    not_marked: list[str]
    unknown: list[str]


class AgentAnswer(_Answer):
    """An agent's definition."""

    name: str
    image: str
    description: str
    capabilities: list[str]
    hardened: bool
    status: Literal["defined", "removed"]
    defined_at: AwareDatetime


class AgentsAnswer(_Answer):
    """All agents by name, and what is wrong with files that define none: `file: reason`."""

    agents: list[AgentAnswer]
    faults: dict[str, str]


class TaskAnswer(_Answer):
    """A task. `token_id`: the first 12 digits of the hash of its token. `session_name`: the container that its
    agent runs in. `result`: any JSON, null for a task that was not completed.
    """

    id: str
    description: str
    agent_name: str
    status: TASK_STATES
    token_id: str | None
    session_name: str | None
    result: Any
    error: str | None
    submitted_by: str
    submitted_at: AwareDatetime
    started_at: AwareDatetime | None
    ended_at: AwareDatetime | None


class SubmittedAnswer(_Answer):
    """A task that runs. Its token is told here, and again for a retry with the same idempotency key. `mailbox`:
    the recipient of messages to it.
    """

    task: TaskAnswer
    token: str
    url: str
    mailbox: str


class TasksAnswer(_Answer):
    """The newest tasks that fit, and how many fit."""

    tasks: list[TaskAnswer]
    total: int


class TokenAnswer(_Answer):
    """A task's token; of its value nothing is known. `issued`, `expiry`: milliseconds since 1970 UTC."""

    token_id: str
    agent_name: str
    task_id: str
    capabilities: list[str]
    status: Literal["active", "revoked", "expired"]
    issued: int
    expiry: int
    revoked_at: AwareDatetime | None
    revoked_why: str | None


class TokensAnswer(_Answer):
    """The newest tokens that fit, and how many fit."""

    tokens: list[TokenAnswer]
    total: int


class SessionContextAnswer(_Answer):
    """What a launcher has made for a task (HH-05, HH-11). `secrets`: names of variables, no values."""

    session_name: str
    container_name: str
    port: int | None
    role: str
    state: str
    secrets: list[str]
    backend: str
    task_id: str
    error: str | None
    changed_at: AwareDatetime


class ContainersAnswer(_Answer):
    """The newest containers, and how many there are."""

    containers: list[SessionContextAnswer]
    total: int


class AuditEntry(_Answer):
    """A message that was delivered, or a request to send one that was refused."""

    at: AwareDatetime
    verdict: Literal["delivered", "rejected"]
    sender: str
    recipient: str | None
    type: str | None
    message_id: str | None
    reason: str | None
    why: str | None


class AuditAnswer(_Answer):
    """The newest entries of the audit log, oldest of them first."""

    entries: list[AuditEntry]
