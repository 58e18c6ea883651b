"""The rows of the views: the latest state of what a record changed, typed. The fold makes them.

A `Moment` is Kafka's append time in microseconds since 1970 UTC.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

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
REGISTRY_PARTICIPANTS: Final = "registry_participants"
REGISTRY_KEYS: Final = "registry_keys"
REGISTRY_MQTT_AGENTS: Final = "registry_mqtt_agents"
REGISTRY_LISTENERS: Final = "registry_listeners"
REGISTRY_THREADS: Final = "registry_threads"


class Row(msgspec.Struct, frozen=True, gc=False):
    """A row of a view. `VIEW` names the view; `KEY` are the columns whose values identify the row."""

    VIEW: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]

    @property
    def key(self) -> str:
        """The values of the key columns, joined by a slash."""
        return "/".join(getattr(self, column) for column in self.KEY)


class JobRow(Row, frozen=True, gc=False):
    """A row of `registry_jobs`. `session_wanted` may alone pick it; `session` has it.
    `ended_by`: CloudEvents id of the record that ended the job, the cause of what follows from it. `notify`:
    what who registered it wants to be told of; None: of its end. `secret_rotations`: how often it was given a
    new secret, None: never; until `old_secret_ends_at` the one before it signs, too.
    """

    VIEW: ClassVar = REGISTRY_JOBS
    KEY: ClassVar = ("job_id",)

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
    notify: list[str] | None = None
    secret_rotations: int | None = None
    old_secret_ends_at: Moment | None = None


class SessionRow(Row, frozen=True, gc=False):
    """A row of `registry_sessions`. `handle` says what runs on `host`: `tmux/<socket>/<name>` or
    `process/<pid>/<start time>`, None for a session that only its name is known of. `for_job`: the session
    was made for this job and ends with it; `job_id`: the job that it hosts now.
    """

    VIEW: ClassVar = REGISTRY_SESSIONS
    KEY: ClassVar = ("session",)

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


class PrincipalRow(Row, frozen=True, gc=False):
    """A row of `registry_principals`; of the token only its SHA-256 (hex) is known."""

    VIEW: ClassVar = REGISTRY_PRINCIPALS
    KEY: ClassVar = ("principal",)

    principal: str
    role: str
    status: str
    token_sha256: str
    added_by: str
    added_at: Moment
    revoked_at: Moment | None


class MessageRow(Row, frozen=True, gc=False):
    """A row of `mailbox`: where one message for one recipient stands; what it says is in `message_bodies`.

    `sent_at` and `expires_at` as the sender says. `from_task`: the task whose token the sender had.
    `handed_to` (`<door>/<principal>`) got it last, by the request `request_id`, at `handed_at`; `lease_until`
    while it is leased. `ended_at`: when it reached a final status. `thread` is the recipient's name of the
    conversation; `parent_thread`, `root_thread`, `on_behalf_of` are its place in the tree (XP-07).
    """

    VIEW: ClassVar = MAILBOX_VIEW
    KEY: ClassVar = ("realm", "recipient", "message_id")

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
    parent_thread: str | None = None
    root_thread: str | None = None
    on_behalf_of: str | None = None


class MessageBodyRow(Row, frozen=True, gc=False):
    """A row of `message_bodies`: what a message says. Written once: what happens to a message rewrites only its
    small row in `mailbox`.
    """

    VIEW: ClassVar = MESSAGE_BODIES
    KEY: ClassVar = ("realm", "recipient", "message_id")

    realm: str
    recipient: str
    message_id: str
    body: str
    content_type: str


class TaskRow(Row, frozen=True, gc=False):
    """A row of `registry_tasks`. `ended_by`: CloudEvents id of the record that ended it. `image`: of an agent
    that was spawned for this task and has no definition.
    """

    VIEW: ClassVar = REGISTRY_TASKS
    KEY: ClassVar = ("task_id",)

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
    image: str | None = None


class TokenRow(Row, frozen=True, gc=False):
    """A row of `registry_tokens`. `token_id`: the first 12 digits of `token_sha256` (hex), which is all that is
    known of the token. `issued`, `expiry`: milliseconds since 1970 UTC.
    """

    VIEW: ClassVar = REGISTRY_TOKENS
    KEY: ClassVar = ("token_id",)

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


class AgentRow(Row, frozen=True, gc=False):
    """A row of `registry_agents`: a definition out of `conf/agents/`, or that there is none any more."""

    VIEW: ClassVar = REGISTRY_AGENTS
    KEY: ClassVar = ("agent_name",)

    agent_name: str
    status: str
    image: str
    description: str
    capabilities: list[str]
    hardened: bool
    defined_at: Moment
    removed_at: Moment | None


class ContainerRow(Row, frozen=True, gc=False):
    """A row of `registry_containers`: what a launcher has made for a task. `handle` says what runs on `host`,
    as in SessionRow; `backend` names the launcher.
    """

    VIEW: ClassVar = REGISTRY_CONTAINERS
    KEY: ClassVar = ("container",)

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


class ParticipantRow(Row, frozen=True, gc=False):
    """A row of `registry_participants` (AM-06): an agent that takes part with a key of its own. `task_id`: the
    hub's task that it was spawned for, and ends with.
    """

    VIEW: ClassVar = REGISTRY_PARTICIPANTS
    KEY: ClassVar = ("agent_name",)

    agent_name: str
    status: str
    task: str
    capabilities: list[str]
    task_id: str | None
    started_at: Moment
    updated_at: Moment
    stopped_at: Moment | None
    stopped_why: str | None


class AgentKeyRow(Row, frozen=True, gc=False):
    """A row of `registry_keys`: a participant's public key (PEM). `valid_until`: set when a newer one came."""

    VIEW: ClassVar = REGISTRY_KEYS
    KEY: ClassVar = ("agent_name", "key_id")

    agent_name: str
    key_id: str
    public_key: str
    status: str
    registered_at: Moment
    valid_until: Moment | None
    removed_at: Moment | None


class MqttAgentRow(Row, frozen=True, gc=False):
    """A row of `registry_mqtt_agents` (JE-26): an agent that is reached over MQTT. `messages` of it were
    accepted since `registered_at`, the newest by seq is `last_seq`.
    """

    VIEW: ClassVar = REGISTRY_MQTT_AGENTS
    KEY: ClassVar = ("agent_name",)

    agent_name: str
    status: str
    registered_by: str
    registered_at: Moment
    removed_at: Moment | None
    last_seq: int
    messages: int
    last_said_at: Moment | None


class ListenerRow(Row, frozen=True, gc=False):
    """A row of `registry_listeners` (XP-01, XP-09): what takes messages of one root tag. The fields are those
    of `schemas.streams.control.organism.Listener`.
    """

    VIEW: ClassVar = REGISTRY_LISTENERS
    KEY: ClassVar = ("listener",)

    listener: str
    status: str
    type: str
    capability: str
    root_tag: str
    namespace: str
    handler: str | None
    xsd: str | None
    example: str | None
    visible_tools: list[str] | None
    concurrency: int
    per_minute: int | None
    tokens_per_minute: int | None
    timeout_ms: int
    options: str | None
    added_at: Moment
    removed_at: Moment | None


class ThreadRow(Row, frozen=True, gc=False):
    """A row of `registry_threads` (XP-07): who called whom, in whose name. `seen_by` knows the conversation as
    `thread`, `opened_by` as `parent_thread`; a root has no row. `message_id` is the message that opened it.
    """

    VIEW: ClassVar = REGISTRY_THREADS
    KEY: ClassVar = ("thread",)

    thread: str
    parent_thread: str
    root_thread: str
    opened_by: str
    seen_by: str
    on_behalf_of: str
    kind: str
    message_id: str
    opened_at: Moment
