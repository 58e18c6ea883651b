"""The bodies of agents, tasks and tokens (HH-11), and of participants (AM-03, AM-06, AM-09)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field

from connectors.hub.serving.models import (
    OVERLAP_LIMIT_S,
    WHOLE,
    AnswerBody,
    ListLimit,
    NamedThing,
    PageAnswer,
    PageFilter,
    QueryFilter,
    RequestBody,
)
from connectors.operations.rules.message_models import JsonContent, SentMessage
from schemas.streams.agents.agent_registry import KEY_LIMIT
from schemas.streams.task.task_registry import ERROR_LIMIT, RESULT_LIMIT_BYTES, result_text
from schemas.wire.wire_body import TASK_TEXT_LIMIT, Capabilities, Note, Printable

TASK_STATES = Literal["pending", "running", "completed", "failed", "cancelled"]


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
    """Text that the agent gets."""
    agent_name: NamedThing
    """Agent that works on the task."""


class TaskCompletionRequest(RequestBody):
    """The result of a task."""

    result: Annotated[Any, AfterValidator(_result_within_limit)] = ""
    """Result: any JSON, at most 64 KiB as text."""


class TaskFailureRequest(RequestBody):
    """The reason why a task failed."""

    error: Annotated[Printable, Field(max_length=ERROR_LIMIT)]
    """Why the task failed."""


class TaskCancelRequest(RequestBody):
    """The reason for cancelling a task or revoking a token."""

    reason: Note = ""
    """Reason, for people who read the task's history."""


class TaskFilter(QueryFilter):
    """The tasks to list: those that match every filter, newest first."""

    status: TASK_STATES | None = None
    """State of the tasks. Without it: any."""
    agent_name: NamedThing | None = None
    """Agent that works on the tasks. Without it: any."""
    limit: ListLimit = 100
    """Largest number of tasks in the answer."""


class TaskLimit(QueryFilter):
    """The largest number of items to list, newest first."""

    limit: ListLimit = 100
    """Largest number of items in the answer."""


class TokenFilter(QueryFilter):
    """The tokens to list, newest first."""

    status: Literal["active", "revoked", "expired"] | None = None
    """State of the tokens. Without it: any."""
    limit: ListLimit = 100
    """Largest number of tokens in the answer."""


class AgentAnswer(AnswerBody):
    """The definition of an agent."""

    name: str
    """Name of the agent."""
    image: str
    """Image that the launcher runs for the agent."""
    description: str
    """Description of what the agent does."""
    capabilities: list[str]
    """Names of what the agent can do."""
    hardened: bool
    """True if the agent runs with reduced rights."""
    status: Literal["defined", "removed"]
    """`removed`: the definition was deleted, and the agent gets no new task."""
    defined_at: AwareDatetime
    """Time of the newest definition."""


class AgentsAnswer(PageAnswer):
    """Agents, and the faults of invalid definition files."""

    agents: list[AgentAnswer]
    """Agents, sorted by name."""
    faults: dict[str, str]
    """Faults of invalid definition files, by file name."""


class TaskAnswer(AnswerBody):
    """A task."""

    id: str
    """Id of the task."""
    description: str
    """Text that the agent gets."""
    agent_name: str
    """Agent that works on the task."""
    status: TASK_STATES
    """State of the task."""
    token_id: str | None
    """First 12 digits of the hash of the task's token. Null: the task has not started."""
    session_name: str | None
    """Container of the task's agent. Null: none."""
    result: Any
    """Result: any JSON. Null: the task is not completed."""
    error: str | None
    """Why the task failed or was cancelled. Null: no reason."""
    submitted_by: str
    """Principal that submitted the task."""
    submitted_at: AwareDatetime
    """Time of the submission."""
    started_at: AwareDatetime | None
    """Time at which the task started. Null: it has not."""
    ended_at: AwareDatetime | None
    """Time at which the task ended. Null: it has not."""


class SubmittedAnswer(AnswerBody):
    """A started task and its token."""

    task: TaskAnswer
    """The task."""
    token: str
    """Token of the task's agent. Only a retry with the same idempotency key shows it again."""
    url: str
    """Address of the hub, for the agent."""
    mailbox: str
    """Recipient of messages to the task's agent."""


class TasksAnswer(AnswerBody):
    """The newest matching tasks, and the number of all matching tasks."""

    tasks: list[TaskAnswer]
    """Tasks, newest first."""
    total: int
    """Number of all matching tasks."""
    left: int
    """Number of tasks that were asked for and are not in the answer, because it would be too long."""


class TokenAnswer(AnswerBody):
    """The token of a task, without its value."""

    token_id: str
    """First 12 digits of the token's hash."""
    agent_name: str
    """Agent that has the token."""
    task_id: str
    """Task for which the token was issued."""
    capabilities: list[str]
    """Names of what the agent can do."""
    status: Literal["active", "revoked", "expired"]
    """State of the token."""
    issued: int
    """Time of issue, in milliseconds since 1970 UTC."""
    expiry: int
    """Time of expiry, in milliseconds since 1970 UTC."""
    revoked_at: AwareDatetime | None
    """Time at which the token was revoked. Null: it was not."""
    revoked_why: str | None
    """Why the token was revoked. Null: no reason."""


class TokensAnswer(AnswerBody):
    """The newest matching tokens, and the number of all matching tokens."""

    tokens: list[TokenAnswer]
    """Tokens, newest first."""
    total: int
    """Number of all matching tokens."""


class SessionContextAnswer(AnswerBody):
    """The container of a task: the process that runs its agent (HH-05, HH-11)."""

    session_name: str
    """Name of the container."""
    container_name: str
    """Name of the container, as `session_name`."""
    port: int | None
    """TCP port of the container. Null: none."""
    role: str
    """Role of the agent at the hub."""
    state: str
    """State of the container, such as `running` or `recycled`."""
    secrets: list[str]
    """Names of its secret variables, without values."""
    backend: str
    """Kind of the launcher."""
    task_id: str
    """Task that the agent works on."""
    error: str | None
    """Why the container failed. Null: it has not."""
    changed_at: AwareDatetime
    """Time of the newest change of `state`."""


class ContainersAnswer(AnswerBody):
    """The newest containers, and the number of all containers."""

    containers: list[SessionContextAnswer]
    """Containers, newest first."""
    total: int
    """Number of all containers."""


Status = Literal["initializing", "idle", "working", "blocked", "stopped"]


class SpawnRequest(RequestBody):
    """An agent to start."""

    task: Annotated[Printable, Field(min_length=1, max_length=TASK_TEXT_LIMIT)]
    """Description of the agent's work."""
    agent_name: NamedThing | None = None
    """Name of the agent. Null: the gateway chooses one."""
    capabilities: Capabilities = Field([])
    """Names of what the agent can do."""


class JoinRequest(RequestBody):
    """An agent that runs elsewhere and keeps its own private key."""

    agent_name: NamedThing
    """Name of the agent."""
    public_key: Annotated[str, Field(max_length=KEY_LIMIT)]
    """Public RSA key of the agent, in PEM."""
    task: Annotated[Printable, Field(max_length=TASK_TEXT_LIMIT)] = ""
    """Description of the agent's work."""
    capabilities: Capabilities = Field([])
    """Names of what the agent can do."""


class KeyRequest(RequestBody):
    """An additional key of an agent."""

    public_key: Annotated[str, Field(max_length=KEY_LIMIT)]
    """Public RSA key of the agent, in PEM."""
    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_S), WHOLE] = 3600
    """How long the agent's present keys stay valid, in seconds."""


class AgentStopRequest(RequestBody):
    """The reason for stopping an agent."""

    reason: Note = ""
    """Reason for the stop."""


class BroadcastRequest(SentMessage, JsonContent):
    """A message to all participants."""

    type: Annotated[Printable, Field(min_length=1, max_length=128)]
    """Kind of the message, a word that the sender chooses."""
    payload: Any = None
    """Content of the message: any JSON."""


class ParticipantFilter(PageFilter):
    """The participants to list."""

    status: Status | None = None
    """State of the participants. Without it: all that have not stopped."""
    capability: NamedThing | None = None
    """Name of something that the participants can do. Without it: any."""


class KeyAnswer(AnswerBody):
    """A public key of an agent that is valid, or was valid until recently."""

    key_id: str
    """Id of the key: the first 16 hex digits of its hash."""
    registered_at: AwareDatetime
    """Time of the registration."""
    valid_until: AwareDatetime | None
    """Time until which the key is valid. Null: without an end."""


class Participant(AnswerBody):
    """A participant, without its keys."""

    id: str
    """Name of the agent."""
    task: str
    """Description of the agent's work."""
    status: Status
    """State in the agent's life cycle."""
    capabilities: list[str]
    """Names of what the agent can do."""
    task_id: str | None
    """Task for which the gateway spawned the agent. Null: none."""
    started_at: AwareDatetime
    """Time at which the agent joined."""
    updated_at: AwareDatetime
    """Time of the newest change of the agent's status or capabilities."""
    stopped_at: AwareDatetime | None
    """Time at which the agent stopped. Null: it takes part."""
    stopped_why: str | None
    """Reason for the stop. Null: none was given, or the agent takes part."""


class ParticipantAnswer(Participant):
    """A participant with its keys."""

    keys: list[KeyAnswer]
    """Public keys of the agent, oldest first."""


class ParticipantsAnswer(PageAnswer):
    """The participants that match every filter."""

    participants: list[ParticipantAnswer]
    """Participants, sorted by name."""


class ReplayedAnswer(AnswerBody):
    """A dead message that was posted again."""

    replayed: bool
    """Always true."""
    message_id: str
    """Id of the new message."""


class BroadcastAnswer(AnswerBody):
    """A broadcast: one message in each recipient's mailbox."""

    broadcast_id: str
    """Id that all copies of the broadcast share."""
    recipients: int
    """Number of mailboxes that got the message."""
    full: int
    """Number of mailboxes that got none, because they are full."""


class ClearedAnswer(AnswerBody):
    """A mailbox that was cleared."""

    cleared: int
    """Number of messages that were removed."""
