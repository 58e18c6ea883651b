"""The rows of the views: the latest state of what a record changed, typed. The fold makes them.

A `Moment` is Kafka's append time in microseconds since 1970 UTC.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

Moment = Annotated[int, msgspec.Meta(description="microseconds since 1970 UTC")]

REGISTRY_JOBS: Final = "registry_jobs"
REGISTRY_SESSIONS: Final = "registry_sessions"
REGISTRY_PRINCIPALS: Final = "registry_principals"
MAILBOX_VIEW: Final = "mailbox"
MESSAGE_BODIES: Final = "message_bodies"
REGISTRY_TASKS: Final = "registry_tasks"
REGISTRY_TOKENS: Final = "registry_tokens"
REGISTRY_AGENTS: Final = "registry_agents"
REGISTRY_CONTAINERS: Final = "registry_containers"


class JobRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_jobs`. `session_wanted` may alone pick it; `session` has it.
    `ended_by`: CloudEvents id of the record that ended the job, the cause of what follows from it.
    """

    job_id: str
    status: str
    description: str
    session_wanted: str | None
    session: str | None
    registered_by: str
    registered_at: Moment
    picked_at: Moment | None
    started_at: Moment | None
    ended_at: Moment | None
    ended_by: str | None
    last_seq: int
    last_event: str | None
    last_detail: str | None
    events: int


class SessionRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_sessions`. `handle` says what runs on `host`: `tmux/<socket>/<name>` or
    `process/<pid>/<start time>`, None for a session that only its name is known of. `for_job`: the session
    was made for this job and ends with it; `job_id`: the job that it hosts now.
    """

    session: str
    status: str
    description: str
    host: str | None
    handle: str | None
    for_job: str | None
    job_id: str | None
    jobs_ended: int
    created_by: str
    created_at: Moment
    stopped_at: Moment | None
    reason: str | None
    capture_id: str | None


class PrincipalRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_principals`; of the token only its SHA-256 (hex) is known."""

    principal: str
    role: str
    status: str
    token_sha256: str
    added_by: str
    added_at: Moment
    revoked_at: Moment | None


class MessageRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `mailbox`: where one message for one recipient stands; what it says is in `message_bodies`.

    `sent_at` and `expires_at` as the sender says. `from_task`: the task whose token the sender had.
    `handed_to` (`<door>/<principal>`) got it last, by the request `request_id`, at `handed_at`; `lease_until`
    while it is leased. `ended_at`: when it reached a final status.
    """

    realm: str
    recipient: str
    message_id: str
    status: str
    sender: str
    from_verified: bool
    from_task: str | None
    kind: str
    priority: str
    in_reply_to: str | None
    thread: str | None
    broadcast_id: str | None
    sent_at: str | None
    expires_at: str | None
    posted_at: Moment
    attempts: int = 0
    handed_to: str | None = None
    handed_at: Moment | None = None
    request_id: str | None = None
    lease_until: Moment | None = None
    ended_at: Moment | None = None


class MessageBodyRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `message_bodies`: what a message says. Written once: what happens to a message rewrites only its
    small row in `mailbox`.
    """

    realm: str
    recipient: str
    message_id: str
    body: str
    content_type: str


class TaskRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_tasks`. `ended_by`: CloudEvents id of the record that ended it."""

    task_id: str
    status: str
    description: str
    agent_name: str
    token_id: str | None
    session_name: str | None
    result: str | None
    error: str | None
    submitted_by: str
    submitted_at: Moment
    started_at: Moment | None
    ended_at: Moment | None
    ended_by: str | None


class TokenRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_tokens`. `token_id`: the first 12 digits of `token_sha256` (hex), which is all that is
    known of the token. `issued`, `expiry`: milliseconds since 1970 UTC.
    """

    token_id: str
    token_sha256: str
    agent_name: str
    task_id: str
    capabilities: list[str]
    status: str
    issued: int
    expiry: int
    revoked_at: Moment | None
    revoked_why: str | None


class AgentRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_agents`: a definition out of `conf/agents/`, or that there is none any more."""

    agent_name: str
    status: str
    image: str
    description: str
    capabilities: list[str]
    hardened: bool
    defined_at: Moment
    removed_at: Moment | None


class ContainerRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_containers`: what a launcher has made for a task. `handle` says what runs on `host`,
    as in SessionRow; `backend` names the launcher.
    """

    container: str
    state: str
    task_id: str
    agent_name: str
    backend: str
    host: str | None
    handle: str | None
    port: int | None
    error: str | None
    created_at: Moment
    changed_at: Moment


ViewRow = (
    JobRow
    | SessionRow
    | PrincipalRow
    | MessageRow
    | MessageBodyRow
    | TaskRow
    | TokenRow
    | AgentRow
    | ContainerRow
)
