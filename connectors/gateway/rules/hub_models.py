"""The request and answer bodies of agents, tasks, tokens and messages (HH-11)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field

from connectors.gateway.web.models import WHOLE, AnswerBody, ListLimit, NamedThing, QueryFilter, RequestBody
from schemas.streams.mailboxes.mailbox_bodies import CLAIM_LIMIT, LEASE_MS_MOST, LIMIT_MOST
from schemas.streams.principal.principals import HUB
from schemas.streams.task.task_registry import ERROR_LIMIT, RESULT_LIMIT_BYTES, result_text
from schemas.wire.wire_body import TASK_TEXT_LIMIT, Note, Printable

TASK_STATES = Literal["pending", "running", "completed", "failed", "cancelled"]
MessageKind = Annotated[Printable, Field(max_length=128)]
"""The type of a message."""


def _result_within_limit(result: Any) -> Any:
    size = len(result_text(result).encode("utf-8"))
    if size > RESULT_LIMIT_BYTES:
        raise ValueError(
            f"has {size} bytes as text, and may have {RESULT_LIMIT_BYTES}; send what is long as messages"
        )
    return result


class TaskRequest(RequestBody):
    """A task for an agent."""

    description: Annotated[Printable, Field(max_length=TASK_TEXT_LIMIT)]
    agent_name: NamedThing


class TaskCompletionRequest(RequestBody):
    """The result of a task: any JSON, at most 64 KiB as text."""

    result: Annotated[Any, AfterValidator(_result_within_limit)] = ""


class TaskFailureRequest(RequestBody):
    """The reason why a task failed."""

    error: Annotated[Printable, Field(max_length=ERROR_LIMIT)]


class TaskCancelRequest(RequestBody):
    """The reason for cancelling a task or revoking a token."""

    reason: Note = ""


class TaskFilter(QueryFilter):
    """The tasks to list: those that match every filter, newest first."""

    status: TASK_STATES | None = None
    agent_name: NamedThing | None = None
    limit: ListLimit = 100


class TaskLimit(QueryFilter):
    """The largest number of items to list, newest first."""

    limit: ListLimit = 100


class TokenFilter(QueryFilter):
    """The tokens to list, newest first."""

    status: Literal["active", "revoked", "expired"] | None = None
    limit: ListLimit = 100


class AuditFilter(QueryFilter):
    """The number of newest entries to show, by default the setting `gateway.audit_messages`."""

    limit: ListLimit | None = None


WAIT_S_MOST = 300
LEASE_S_MOST = LEASE_MS_MOST // 1000
WaitSeconds = Annotated[float, Field(ge=0, le=WAIT_S_MOST, allow_inf_nan=False)]
"""How long a request may wait, in seconds."""
LeaseSeconds = Annotated[int, Field(ge=1, le=LEASE_S_MOST), WHOLE]
"""The duration of a lease in seconds."""
MessageIds = Annotated[list[NamedThing], Field(min_length=1, max_length=LIMIT_MOST)]
"""The ids of messages in the caller's own mailbox."""


class DrainFilter(QueryFilter):
    """How to take messages out of the caller's mailbox.

    `limit`: the largest number of messages. `wait`: how many seconds to wait for the first message. `lease`:
    for how many seconds the messages are leased; without it they are taken for good.
    """

    limit: Annotated[int, Field(ge=1, le=LIMIT_MOST)] = CLAIM_LIMIT
    wait: WaitSeconds = 0
    lease: LeaseSeconds | None = None


class SendFilter(QueryFilter):
    """`wait_reply`: how many seconds to wait for the reply to the message."""

    wait_reply: WaitSeconds = 0


class MessageEnvelope(RequestBody):
    """A message.

    `recipient`: the name of a mailbox, by default the hub's. `payload`: any JSON. `in_reply_to`: the id of the
    message that this one answers. `thread`: the id of the conversation, by default that of the answered
    message.
    """

    recipient: NamedThing = HUB
    type: MessageKind
    payload: Any = Field({})
    in_reply_to: NamedThing | None = None
    thread: NamedThing | None = None


class MessageAnswer(AnswerBody):
    """A message that was taken from a mailbox.

    `in_reply_to` and `thread` are left out of a message without them. `attempt` and `deadline` are there for a
    leased message: how often it was handed out by now, and the end of the lease.
    """

    id: str
    timestamp: AwareDatetime
    sender: str
    recipient: str
    type: str
    payload: Any
    in_reply_to: str | None = None
    thread: str | None = None
    attempt: int | None = None
    deadline: AwareDatetime | None = None


class DeliveredAnswer(AnswerBody):
    """A message that is in the mailbox of its recipient. `reply`: the reply, if the request waited for it."""

    delivered: bool
    message_id: str
    reply: MessageAnswer | None = None


class DrainedAnswer(AnswerBody):
    """The messages taken from the caller's mailbox, most urgent first.

    `left`: the number of remaining ones. `lease_id`: the id of the lease, if the messages are leased.
    """

    messages: list[MessageAnswer]
    left: int
    lease_id: str | None = None


class AckRequest(RequestBody):
    """Leased messages that the caller has finished with. `lease_id`: the id of their lease."""

    lease_id: NamedThing
    message_ids: MessageIds


class NackRequest(AckRequest):
    """Leased messages that the caller gives back. `reason`: why, for the mailbox's owner and the operator."""

    reason: Note = ""


class ExtendRequest(AckRequest):
    """Leased messages that take longer. `lease`: the seconds from now to the new end of the lease."""

    lease: LeaseSeconds


class LeaseFault(AnswerBody):
    """A message that a request about a lease could not change. `reason`: a stable code. `message`: why."""

    message_id: str
    reason: str
    message: str


class LeaseEndAnswer(AnswerBody):
    """The message ids of the request, each once: those that it changed, and those that it could not change."""

    done: list[str]
    refused: list[LeaseFault]


class ExtendedAnswer(LeaseEndAnswer):
    """As `LeaseEndAnswer`. `deadline`: the new end of the lease; null if no message was changed."""

    deadline: AwareDatetime | None


class ReadRequest(RequestBody):
    """The ids of messages in the caller's own mailbox to mark as read."""

    message_ids: Annotated[list[NamedThing], Field(max_length=LIMIT_MOST)]


class ReadAnswer(AnswerBody):
    """The message ids of the request by their result, each once.

    `read`: read now, by this request or an earlier one. `not_marked`: leased through another interface, or
    ended meanwhile in another way. `unknown`: not in the caller's mailbox, or expired.
    """

    read: list[str]
    not_marked: list[str]
    unknown: list[str]


class AgentAnswer(AnswerBody):
    """The definition of an agent."""

    name: str
    image: str
    description: str
    capabilities: list[str]
    hardened: bool
    status: Literal["defined", "removed"]
    defined_at: AwareDatetime


class AgentsAnswer(AnswerBody):
    """All agents, sorted by name, and the faults of invalid definition files, by file name."""

    agents: list[AgentAnswer]
    faults: dict[str, str]


class TaskAnswer(AnswerBody):
    """A task.

    `token_id`: the first 12 digits of the hash of its token. `session_name`: the container of its agent.
    `result`: any JSON; null for a task that was not completed.
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


class SubmittedAnswer(AnswerBody):
    """A started task and its token.

    A retry with the same idempotency key gets the same token; nothing else shows it. `mailbox`: the recipient
    of messages to the task's agent.
    """

    task: TaskAnswer
    token: str
    url: str
    mailbox: str


class TasksAnswer(AnswerBody):
    """The newest matching tasks, and the number of all matching tasks."""

    tasks: list[TaskAnswer]
    total: int


class TokenAnswer(AnswerBody):
    """The token of a task, without its value. `issued`, `expiry`: milliseconds since 1970 UTC."""

    token_id: str
    agent_name: str
    task_id: str
    capabilities: list[str]
    status: Literal["active", "revoked", "expired"]
    issued: int
    expiry: int
    revoked_at: AwareDatetime | None
    revoked_why: str | None


class TokensAnswer(AnswerBody):
    """The newest matching tokens, and the number of all matching tokens."""

    tokens: list[TokenAnswer]
    total: int


class SessionContextAnswer(AnswerBody):
    """The container of a task (HH-05, HH-11). `secrets`: the names of its secret variables, without values."""

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


class ContainersAnswer(AnswerBody):
    """The newest containers, and the number of all containers."""

    containers: list[SessionContextAnswer]
    total: int


class AuditEntry(AnswerBody):
    """A delivered message, or a refused request to send one."""

    at: AwareDatetime
    verdict: Literal["delivered", "rejected"]
    sender: str
    recipient: str | None
    type: str | None
    message_id: str | None
    reason: str | None
    why: str | None


class AuditAnswer(AnswerBody):
    """The newest entries of the audit log, oldest first."""

    entries: list[AuditEntry]
