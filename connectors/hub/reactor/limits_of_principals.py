"""The limits that apply to a principal: its own, those of its role, those for all, or the defaults (LM-02)."""

from __future__ import annotations

from typing import Final, NamedTuple, cast

from connectors.hub.reactor.known_recipients import GetRow
from schemas.streams.agents.mqtt_agents import MqttAgentRow
from schemas.streams.agents.participants import ParticipantRow
from schemas.streams.control.limits import ALL, NAME, ROLE, SUBSCRIPTIONS_DEFAULT, LimitRow
from schemas.streams.mailboxes.mailbox_bodies import PENDING_DEFAULT
from schemas.streams.principal.principals import AGENT, PrincipalRow


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

    Each limit is that of the name, else that of its role, else that for all, else the default. `get` is the
    look-up of rows, such as `LiveView.get`.
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
