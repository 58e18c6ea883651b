"""The records about tasks of the hub and their tokens (HH-02 to HH-04): their bodies."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, Field

from schemas.fold.stream_kind import CANCELLED, COMPLETED, PENDING, RUNNING, terminal_states
from schemas.fold.view_rows import Moment, Row
from schemas.streams.principal.principals import REVOKED
from schemas.wire.wire_body import (
    TASK_TEXT_LIMIT,
    Capabilities,
    Image,
    Name,
    Note,
    Printable,
    WireBody,
    models_of,
)
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode

TASK_CREATED: Final = "task.created"
TASK_STARTED: Final = "task.started"
TASK_COMPLETED: Final = "task.completed"
TASK_FAILED: Final = "task.failed"
TASK_CANCELLED: Final = "task.cancelled"
TOKEN_REVOKED: Final = "token.revoked"  # noqa: S105  a type's name
REGISTRY_TASKS: Final = "registry_tasks"
REGISTRY_TOKENS: Final = "registry_tokens"

FAILED: Final = "failed"
TASK_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    PENDING: frozenset({RUNNING, CANCELLED}),
    RUNNING: frozenset({COMPLETED, FAILED, CANCELLED}),
    COMPLETED: frozenset(),
    FAILED: frozenset(),
    CANCELLED: frozenset(),
}
TASK_STATES: Final = tuple(TASK_TRANSITIONS)
TASK_TERMINAL: Final = terminal_states(TASK_TRANSITIONS)

ERROR_LIMIT: Final = 2000
RESULT_LIMIT_BYTES: Final = 64 * 1024
LIFETIME_LIMIT_MS: Final = 7 * 24 * 3600 * 1000
TOKEN_ID_DIGITS: Final = 12


def _text_within_limit(text: str) -> str:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate") from None
    if size > RESULT_LIMIT_BYTES:
        raise ValueError(f"longer than {RESULT_LIMIT_BYTES} bytes")
    return text


Description = Annotated[Printable, Field(min_length=1, max_length=TASK_TEXT_LIMIT)]
"""The text of a task."""
TokenSha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
"""The SHA-256 of a token in hex, the only form in which the log stores it."""
TokenId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}\z")]
"""The id of a token: the first 12 digits of its hash."""


class TaskRow(Row, frozen=True, gc=False):
    """A row of `registry_tasks`: a task that the hub gives to an agent."""

    VIEW: ClassVar = REGISTRY_TASKS
    KEY: ClassVar = ("task_id",)
    ORDER: ClassVar = "submitted_at"

    task_id: str
    """Id of the task."""
    status: str
    """`pending`, `running`, `completed`, `failed` or `cancelled`."""
    description: str
    """Text that the agent gets."""
    agent_name: str
    """Agent that works on the task."""
    token_id: str | None
    """Id of the token of the task's agent. Null: the task has not started."""
    session_name: str | None
    """Session in which the agent runs. Null: none."""
    result: str | None
    """Result that the agent reported. Null: the task is not completed."""
    error: str | None
    """Why the task failed or was cancelled. Null: no reason."""
    submitted_by: str
    """Principal that submitted the task."""
    submitted_at: Moment
    """Time of the submission."""
    started_at: Moment | None
    """Time at which the task started."""
    ended_at: Moment | None
    """Time at which the task ended."""
    ended_by: str | None
    """CloudEvents id of the record that ended the task."""
    image: str | None = None
    """Image of an agent that was started for this task alone and has no definition. Null: no such agent."""

    @property
    def is_live(self) -> bool:
        """True if the task has not ended."""
        return self.status not in TASK_TERMINAL

    @property
    def lists(self) -> tuple[str, ...]:
        """The lists of the row's status, and of status and agent."""
        return (self.status, f"{self.status}/{self.agent_name}")


class TokenRow(Row, frozen=True, gc=False):
    """A row of `registry_tokens`: the token with which a task's agent authenticates itself."""

    VIEW: ClassVar = REGISTRY_TOKENS
    KEY: ClassVar = ("token_id",)
    ORDER: ClassVar = "issued"

    token_id: str
    """First 12 digits of `token_sha256`."""
    token_sha256: str
    """SHA-256 of the token, in hex. The token itself is not stored."""
    agent_name: str
    """Agent that has the token."""
    task_id: str
    """Task for which the token was issued."""
    capabilities: list[str]
    """Names of what the agent can do."""
    status: str
    """`active` or `revoked`."""
    issued: int
    """Time of issue in milliseconds since 1970 UTC."""
    expiry: int
    """Time of expiry in milliseconds since 1970 UTC."""
    revoked_at: Moment | None
    """Time at which the token was revoked. Null: it was not."""
    revoked_why: str | None
    """Why the token was revoked. Null: no reason."""

    @property
    def is_live(self) -> bool:
        """True if the token is not revoked."""
        return self.status != REVOKED

    @property
    def lists(self) -> tuple[str, ...]:
        """The list of the row's status."""
        return (self.status,)


class _TaskBody(WireBody):
    STREAM: ClassVar = "task/{task_id}"
    IDENTITY: ClassVar = ("{origin}", "{task_id}", "{request_id}")

    task_id: Name
    request_id: Name


class TaskCreation(_TaskBody):
    """Body of `task.created`: the task exists, is pending, and its agent has no token yet."""

    TYPE: ClassVar = TASK_CREATED

    description: Description
    agent_name: Name


class TaskStart(_TaskBody):
    """Body of `task.started`: the task runs, with a token that expires `expiry_ms` after the record's time.

    Without an earlier `task.created`, the record also creates the task. A door derives the same token for the
    same request, so a repeated request has the same body. `image` is set if the agent is started for this task
    alone and has no definition.
    """

    TYPE: ClassVar = TASK_STARTED

    description: Description
    agent_name: Name
    capabilities: Capabilities
    token_sha256: TokenSha256
    expiry_ms: Annotated[int, Field(ge=1, le=LIFETIME_LIMIT_MS)]
    session_name: Name | None = None
    image: Image | None = None


class TaskCompletion(_TaskBody):
    """Body of `task.completed`: the agent finished the task.

    `result` is its result, any JSON value, as the text that `result_text` makes of it.
    """

    TYPE: ClassVar = TASK_COMPLETED

    result: Annotated[str, AfterValidator(_text_within_limit)]


class TaskFailure(_TaskBody):
    """Body of `task.failed`: the task ended without a result. `error` says why."""

    TYPE: ClassVar = TASK_FAILED

    error: Annotated[Printable, Field(max_length=ERROR_LIMIT)]


class TaskCancellation(_TaskBody):
    """Body of `task.cancelled`: a principal ended the task, perhaps before it started."""

    TYPE: ClassVar = TASK_CANCELLED

    reason: Note = ""


class TokenRevocation(_TaskBody):
    """Body of `token.revoked`: the token is no longer valid. The task continues."""

    TYPE: ClassVar = TOKEN_REVOKED

    token_id: TokenId
    reason: Note = ""


TASK_MODELS: Final = models_of(
    TaskCreation, TaskStart, TaskCompletion, TaskFailure, TaskCancellation, TokenRevocation
)


def result_text(value: Any) -> str:
    """Return the text in which a task's result `value`, any JSON value, is stored.

    A string is stored unchanged, any other value as canonical JSON. A string that is itself valid JSON is
    stored as a JSON string with quotes, so that `result_value` returns it as a string. Raises ValueError for
    NaN, Infinity and lone surrogates.
    """
    if isinstance(value, str) and not _is_json(value):
        return value
    return canonical(value).decode("utf-8")


def result_value(text: str) -> Any:
    """Return the JSON value of a task's result, of which `result_text` made the stored text `text`.

    A text that is not JSON is returned unchanged, as a string.
    """
    return decode(text.encode("utf-8"))[0] if _is_json(text) else text


def _is_json(text: str) -> bool:
    try:
        decode(text.encode("utf-8"))
    except MalformedJsonError:
        return False
    return True


def token_id_of(token_sha256: str) -> str:
    """Return the id of a token: the first 12 hex digits of its SHA-256 hash `token_sha256`."""
    return token_sha256[:TOKEN_ID_DIGITS]
