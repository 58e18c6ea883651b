"""The views: which there are, what a row of each is, and which columns are its key."""

from __future__ import annotations

from typing import Final, NamedTuple

from schemas.fold.view_rows import (
    MAILBOX_VIEW,
    MESSAGE_BODIES,
    REGISTRY_AGENTS,
    REGISTRY_CONTAINERS,
    REGISTRY_JOBS,
    REGISTRY_KEYS,
    REGISTRY_LISTENERS,
    REGISTRY_MQTT_AGENTS,
    REGISTRY_PARTICIPANTS,
    REGISTRY_PRINCIPALS,
    REGISTRY_SESSIONS,
    REGISTRY_TASKS,
    REGISTRY_THREADS,
    REGISTRY_TOKENS,
    AgentKeyRow,
    AgentRow,
    ContainerRow,
    JobRow,
    ListenerRow,
    MessageBodyRow,
    MessageRow,
    MqttAgentRow,
    ParticipantRow,
    PrincipalRow,
    SessionRow,
    TaskRow,
    ThreadRow,
    TokenRow,
    ViewRow,
)

STREAM_ENTRIES: Final = "stream_entries"


class View(NamedTuple):
    """One view. A change's `key` is the values of `key_columns`, joined by a slash."""

    name: str
    row_type: type[ViewRow]
    key_columns: tuple[str, ...]

    def key_of(self, row: ViewRow) -> str:
        """The key of a row."""
        return "/".join(getattr(row, column) for column in self.key_columns)


# In the order in which a micro-batch is written; `stream_entries` comes last and says how far all are.
VIEWS: Final[dict[str, View]] = {
    view.name: view
    for view in (
        View(REGISTRY_JOBS, JobRow, ("job_id",)),
        View(REGISTRY_SESSIONS, SessionRow, ("session",)),
        View(REGISTRY_PRINCIPALS, PrincipalRow, ("principal",)),
        View(REGISTRY_TASKS, TaskRow, ("task_id",)),
        View(REGISTRY_TOKENS, TokenRow, ("token_id",)),
        View(REGISTRY_AGENTS, AgentRow, ("agent_name",)),
        View(REGISTRY_CONTAINERS, ContainerRow, ("container",)),
        View(REGISTRY_PARTICIPANTS, ParticipantRow, ("agent_name",)),
        View(REGISTRY_KEYS, AgentKeyRow, ("agent_name", "key_id")),
        View(REGISTRY_MQTT_AGENTS, MqttAgentRow, ("agent_name",)),
        View(REGISTRY_LISTENERS, ListenerRow, ("listener",)),
        View(REGISTRY_THREADS, ThreadRow, ("thread",)),
        View(MESSAGE_BODIES, MessageBodyRow, ("realm", "recipient", "message_id")),
        View(MAILBOX_VIEW, MessageRow, ("realm", "recipient", "message_id")),
    )
}
VIEW_TABLES: Final = (*VIEWS, STREAM_ENTRIES)
