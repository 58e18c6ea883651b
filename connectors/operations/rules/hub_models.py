"""The request and answer bodies of agents, tasks and tokens (HH-11)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field

from connectors.hub.serving.models import (
    AnswerBody,
    ListLimit,
    NamedThing,
    PageAnswer,
    QueryFilter,
    RequestBody,
)
from schemas.streams.task.task_registry import ERROR_LIMIT, RESULT_LIMIT_BYTES, result_text
from schemas.wire.wire_body import TASK_TEXT_LIMIT, Note, Printable

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
