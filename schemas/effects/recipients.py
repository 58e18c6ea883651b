"""The recipients that the rows of the views know: the check for a mailbox, and the limits of it (LM-02)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

from schemas.effects.following import GetRow
from schemas.fold.stream_kind import STOPPED
from schemas.streams.agents.agent_registry import DEFINED, AgentRow, ParticipantRow
from schemas.streams.agents.mqtt_agents import REGISTERED, MqttAgentRow
from schemas.streams.control.limits import ALL, NAME, ROLE, SUBSCRIPTIONS_DEFAULT, LimitRow
from schemas.streams.control.organism import ListenerRow
from schemas.streams.mailboxes.mailbox_bodies import PENDING_DEFAULT
from schemas.streams.principal.principals import ACTIVE, AGENT, HUB, OPERATOR, PrincipalRow
from schemas.streams.webhook.webhooks import WebhookRow

# The status with which a row of each type stands for a mailbox.
_STATUSES: Final[dict[type[Any], str]] = {
    AgentRow: DEFINED,
    MqttAgentRow: REGISTERED,
    ListenerRow: ACTIVE,
    PrincipalRow: ACTIVE,
}


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


class Limits(NamedTuple):
    """The limits that apply to one principal. None: no limit. For the fields see `LimitRow`."""

    pending_most: int | None = PENDING_DEFAULT
    bytes_most: int | None = None
    messages_per_minute: int | None = None
    bytes_per_minute: int | None = None
    live_jobs_most: int | None = None
    subscriptions_most: int | None = SUBSCRIPTIONS_DEFAULT

    @property
    def of_mailbox(self) -> dict[str, int | None]:
        """The limits of the principal's mailbox, as arguments of the class `Message`."""
        return {"pending_most": self.pending_most, "bytes_most": self.bytes_most}

    @property
    def rates(self) -> dict[str, int | None]:
        """The messages and bytes that the principal may send in a minute, by the name of the limit."""
        return {"messages_per_minute": self.messages_per_minute, "bytes_per_minute": self.bytes_per_minute}


NO_LIMITS: Final = Limits()
"""The limits of a principal for which none were set."""


def limits_of(get: GetRow, name: str) -> Limits:
    """Return the limits of the principal, participant or listener of this name.

    Each limit is that of the name, else that of its role, else that for all, else that of `NO_LIMITS`. `get` is
    the look-up of rows, such as `LiveView.get`.
    """
    rows = [get(LimitRow, f"{NAME}/{name}"), _of_role(get, name), get(LimitRow, f"{ALL}/{ALL}")]
    known = [row for row in rows if row is not None]
    return Limits(*(_first(known, field) for field in Limits._fields)) if known else NO_LIMITS


def _of_role(get: GetRow, name: str) -> LimitRow | None:
    principal = get(PrincipalRow, name)
    if principal is not None:
        return get(LimitRow, f"{ROLE}/{principal.role}")
    is_agent = get(ParticipantRow, name) is not None or get(MqttAgentRow, name) is not None
    return get(LimitRow, f"{ROLE}/{AGENT}") if is_agent else None


def _first(rows: list[LimitRow], field: str) -> int | None:
    """Return the limit of the first row that has it, else the default."""
    found = [cast("int | None", getattr(row, field)) for row in rows]
    return next((limit for limit in found if limit is not None), getattr(NO_LIMITS, field))
