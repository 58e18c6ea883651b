"""The check whether a name is the name of a mailbox, made with the rows of the live view."""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeVar

from schemas.fold.life_cycles import STOPPED
from schemas.fold.view_rows import Row
from schemas.streams.agents.agent_registry import DEFINED, AgentRow
from schemas.streams.agents.mqtt_agents import REGISTERED, MqttAgentRow
from schemas.streams.agents.participants import ParticipantRow
from schemas.streams.control.organism import ListenerRow
from schemas.streams.principal.principals import ACTIVE, HUB, OPERATOR, PrincipalRow
from schemas.streams.webhook.webhook_registry import WebhookRow

R = TypeVar("R", bound=Row)
# The status with which a row of each type stands for a mailbox.
_STATUSES: Final[dict[type[Any], str]] = {
    AgentRow: DEFINED,
    MqttAgentRow: REGISTERED,
    ListenerRow: ACTIVE,
    PrincipalRow: ACTIVE,
}


class GetRow(Protocol):
    """The type of functions that look up one row of the views, such as `LiveView.get`."""

    def __call__(self, row_type: type[R], key: str, /) -> R | None:
        """Return the row of type `row_type` with the key `key`, or None if there is no such row."""


def is_listener(get: GetRow, name: str) -> bool:
    """Return whether `name` is an active listener of the XML pump, which alone reads its mailbox."""
    row = get(ListenerRow, name)
    return row is not None and row.status == ACTIVE


def has_mailbox(get: GetRow, name: str) -> bool:
    """Return whether messages can be sent to `name`, because the realm `default` has a mailbox of this name.

    The hub, the operator, active principals and active listeners of the XML pump have a mailbox. So do agents
    with a definition, participants that are not stopped, and agents that are registered for MQTT. `get` is the
    look-up of rows, such as `LiveView.get`.
    """
    if name in (HUB, OPERATOR):
        return True
    participant = get(ParticipantRow, name)
    if participant is not None and participant.status != STOPPED:
        return True
    for row_type, status in _STATUSES.items():
        row = get(row_type, name)
        if row is not None and row.status == status:
            return True
    webhook = get(WebhookRow, name)
    return webhook is not None and webhook.has_own_mailbox
