"""The hub's rules for tasks, messages and schedules (HH-09), beyond the policy in `connectors.hub.serving`.

Routes call one function for each question. A function returns the first refusal, and allows the request only
when no rule refuses it. To add a rule, add a refusal to the function.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel, ConfigDict

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowLists
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailboxes import token_mailbox
from connectors.hub.serving.policy import Caller
from schemas.effects.recipients import has_mailbox
from schemas.streams.agents.agent_registry import DEFINED, AgentRow
from schemas.streams.principal.principals import ACTIVE, OPERATOR
from schemas.streams.schedule.schedule_registry import ScheduleRow
from schemas.streams.task.task_registry import TokenRow


class PolicyResult(BaseModel):
    """The result of a policy check: whether the request is allowed and, if not, the reason.

    `reason` is "" for an allowed request. It quotes nothing that the caller sent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    allowed: bool
    reason: str = ""


_ALLOWED: Final = PolicyResult(allowed=True)
SCHEDULES_MOST: Final = 1000
"""The largest number of active schedules of one principal."""


def evaluate_task_assignment(live_view: LiveView, agent_name: str, description: str) -> PolicyResult:
    """Return whether the agent of this name may get a task with this description, and the reason if not.

    The agent must be registered from a file in `conf/agents/`, and the description must not be blank. The
    function records nothing and raises nothing.
    """
    agent = live_view.get(AgentRow, agent_name)
    if agent is None or agent.status != DEFINED:
        return PolicyResult(allowed=False, reason="the agent is not registered")
    if not description.strip():
        return PolicyResult(allowed=False, reason="the task has no description")
    return _ALLOWED


def evaluate_message(
    live_view: LiveView, sender: Caller, recipient: str, kind: str, *, tokens_at_us: int | None = None
) -> PolicyResult:
    """Return whether a message may be sent, and the reason if not.

    The recipient's mailbox must exist, and the type of the message must not be blank. The function records
    nothing and raises nothing.

    Args:
        live_view: The live view.
        sender: The sender. No present rule depends on it: its token and rights were checked before.
        recipient: The name of the mailbox.
        kind: The type of the message.
        tokens_at_us: As of `is_known_recipient`.
    """
    if not is_known_recipient(live_view, recipient, tokens_at_us=tokens_at_us):
        return PolicyResult(allowed=False, reason="no recipient of this name is known")
    return evaluate_publication(kind)


def evaluate_publication(kind: str) -> PolicyResult:
    """Return whether a message of the type `kind` may be published, and the reason if not.

    The type must not be blank. The function records nothing and raises nothing.
    """
    if not kind.strip():
        return PolicyResult(allowed=False, reason="the envelope has no type")
    return _ALLOWED


def evaluate_schedule_count(active: Iterable[ScheduleRow], owner: str, name: str) -> PolicyResult:
    """Return whether a principal may set the schedule `name`, and the reason if it has too many others.

    `active` are the active schedules, and `owner` is the name of the principal. If two gateways check requests
    at the same moment, a principal may have some more than 1,000. The function records nothing and raises
    nothing.
    """
    others = sum(row.owner == owner and row.schedule != name for row in active)
    if others >= SCHEDULES_MOST:
        return PolicyResult(allowed=False, reason=f"a principal may have {SCHEDULES_MOST} active schedules")
    return _ALLOWED


def tokens_at_us(hub: Hub) -> int | None:
    """Return the log's time if each token of a task has a mailbox (`gateway.mailbox_per_token`), else None."""
    return hub.log_clock.now_us() if hub.settings.gateway.mailbox_per_token else None


def is_known_recipient(live_view: LiveView, recipient: str, *, tokens_at_us: int | None = None) -> bool:
    """Return whether a mailbox with the name `recipient` exists.

    The hub and each principal, agent and listener have a mailbox. With `tokens_at_us`, the log's present time,
    each token of a task has one, too, while the token is valid.
    """
    if has_mailbox(live_view.get, recipient):
        return True
    return tokens_at_us is not None and _is_of_valid_token(live_view, recipient, tokens_at_us)


def broadcast_recipients(lists: RowLists, sender: str) -> list[str]:
    """Return the sorted names of the recipients of a broadcast: the operator and all present participants.

    `sender` is the name of the principal or agent that sends the broadcast. It is left out. A participant is
    present until it stops.
    """
    names = {row.agent_name for row in lists.participants_with(None)}
    return sorted((names | {OPERATOR}) - {sender})


def _is_of_valid_token(live_view: LiveView, recipient: str, now_us: int) -> bool:
    token = live_view.get(TokenRow, recipient.rpartition(".")[2])
    if token is None or recipient != token_mailbox(token.agent_name, token.token_id):
        return False
    return token.status == ACTIVE and token.expiry * 1000 > now_us
