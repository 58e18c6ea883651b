"""The views: which there are, what a row of each is, and which columns are its key."""

from __future__ import annotations

from typing import Final

from schemas.fold.view_rows import (
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
    Row,
    SessionRow,
    TaskRow,
    ThreadRow,
    TokenRow,
)

STREAM_ENTRIES: Final = "stream_entries"
# In the order in which a micro-batch is written; `stream_entries` comes last and says how far all are.
VIEWS: Final[dict[str, type[Row]]] = {
    row_type.VIEW: row_type
    for row_type in (
        JobRow,
        SessionRow,
        PrincipalRow,
        TaskRow,
        TokenRow,
        AgentRow,
        ContainerRow,
        ParticipantRow,
        AgentKeyRow,
        MqttAgentRow,
        ListenerRow,
        ThreadRow,
        MessageBodyRow,
        MessageRow,
    )
}
VIEW_TABLES: Final = (*VIEWS, STREAM_ENTRIES)
