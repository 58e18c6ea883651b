"""Who has a mailbox, told from rows alone: the hub, the operator, agents of all kinds, principals."""

from __future__ import annotations

from collections.abc import Callable

from schemas.fold.life_cycles import STOPPED
from schemas.fold.view_rows import (
    REGISTRY_AGENTS,
    REGISTRY_LISTENERS,
    REGISTRY_MQTT_AGENTS,
    REGISTRY_PARTICIPANTS,
    REGISTRY_PRINCIPALS,
    AgentRow,
    ListenerRow,
    MqttAgentRow,
    ParticipantRow,
    PrincipalRow,
    Row,
)
from schemas.streams.agents.agent_registry import DEFINED
from schemas.streams.agents.mqtt_agents import REGISTERED
from schemas.streams.principal.principals import ACTIVE, HUB, OPERATOR

Rows = Callable[[str, str], Row | None]
"""`row(view, key)`."""


def has_mailbox(row: Rows, name: str) -> bool:
    """Whether there is a mailbox of this name: the hub's, the operator's, an agent's (defined, taking part, or
    registered for MQTT), a listener's or a principal's.
    """
    if name in (HUB, OPERATOR):
        return True
    agent = row(REGISTRY_AGENTS, name)
    if isinstance(agent, AgentRow) and agent.status == DEFINED:
        return True
    participant = row(REGISTRY_PARTICIPANTS, name)
    if isinstance(participant, ParticipantRow) and participant.status != STOPPED:
        return True
    by_mqtt = row(REGISTRY_MQTT_AGENTS, name)
    if isinstance(by_mqtt, MqttAgentRow) and by_mqtt.status == REGISTERED:
        return True
    listener = row(REGISTRY_LISTENERS, name)
    if isinstance(listener, ListenerRow) and listener.status == ACTIVE:
        return True
    principal = row(REGISTRY_PRINCIPALS, name)
    return isinstance(principal, PrincipalRow) and principal.status == ACTIVE
