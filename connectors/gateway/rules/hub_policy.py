"""What the hub allows agents and delegators to do with tasks and messages (HH-09): one file for all rules.

Each question has one function, which is all that the routes ask; deny by default. A further rule is one more
function in the tuple of its question: it returns why not, or None.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict

from connectors.gateway.services.mailboxes import token_mailbox
from connectors.gateway.web.policy import Caller
from connectors.live.live_view import LiveView
from connectors.reactor.known_recipients import has_mailbox
from schemas.fold.life_cycles import STOPPED
from schemas.fold.view_rows import (
    REGISTRY_AGENTS,
    REGISTRY_PARTICIPANTS,
    REGISTRY_TOKENS,
    AgentRow,
    ParticipantRow,
    TokenRow,
)
from schemas.streams.agents.agent_registry import DEFINED
from schemas.streams.principal.principals import ACTIVE, OPERATOR

Asked = TypeVar("Asked")


class PolicyResult(BaseModel):
    """The answer to one question. `reason` says why not, and quotes nothing that the caller sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allowed: bool
    reason: str = ""


@dataclass(frozen=True)
class TaskAssignment:
    """Somebody wants `agent_name` to do what `description` says; `agent` is what is known of it."""

    agent_name: str
    description: str
    agent: AgentRow | None


@dataclass(frozen=True)
class MessageSending:
    """`sender` wants a message of `kind` to reach `recipient`."""

    sender: Caller
    recipient: str
    kind: str
    recipient_is_known: bool


def _agent_is_registered(asked: TaskAssignment) -> str | None:
    return None if asked.agent is not None and asked.agent.status == DEFINED else "the agent is not registered"


def _task_has_description(asked: TaskAssignment) -> str | None:
    return None if asked.description.strip() else "the task has no description"


def _recipient_is_known(asked: MessageSending) -> str | None:
    return None if asked.recipient_is_known else "nobody of the recipient's name is known"


def _envelope_has_type(asked: MessageSending) -> str | None:
    return None if asked.kind.strip() else "the envelope has no type"


TASK_RULES: Final[tuple[Callable[[TaskAssignment], str | None], ...]] = (
    _agent_is_registered,
    _task_has_description,
)
MESSAGE_RULES: Final[tuple[Callable[[MessageSending], str | None], ...]] = (
    _recipient_is_known,
    _envelope_has_type,
)


def evaluate_task_assignment(live_view: LiveView, agent_name: str, description: str) -> PolicyResult:
    """Whether the task may be given to the agent."""
    agent = agent_row(live_view, agent_name)
    return _evaluate(TASK_RULES, TaskAssignment(agent_name, description, agent))


def evaluate_message(
    live_view: LiveView, sender: Caller, recipient: str, kind: str, *, per_token: bool = False
) -> PolicyResult:
    """Whether the message may go to the recipient. The sender's token was looked at by the gate (admission.py),
    which lets nobody in whose token is unknown, revoked or expired.
    """
    known = is_known_recipient(live_view, recipient, per_token=per_token)
    return _evaluate(MESSAGE_RULES, MessageSending(sender, recipient, kind, known))


def is_known_recipient(live_view: LiveView, recipient: str, *, per_token: bool = False) -> bool:
    """Whether there is a mailbox of this name (`has_mailbox`); where tokens have mailboxes of their own, also
    that of a token that is valid now.
    """
    return has_mailbox(live_view.get, recipient) or (per_token and _is_of_valid_token(live_view, recipient))


def broadcast_recipients(live_view: LiveView, sender: str) -> list[str]:
    """Whom a broadcast reaches, by name: everybody who takes part now, and the operator, but not its sender."""
    rows = (row for row in live_view.rows(REGISTRY_PARTICIPANTS) if isinstance(row, ParticipantRow))
    names = {row.agent_name for row in rows if row.status != STOPPED}
    return sorted((names | {OPERATOR}) - {sender})


def _is_of_valid_token(live_view: LiveView, recipient: str) -> bool:
    token = live_view.row(REGISTRY_TOKENS, recipient.rpartition(".")[2])
    if not isinstance(token, TokenRow) or recipient != token_mailbox(token.agent_name, token.token_id):
        return False
    return token.status == ACTIVE and token.expiry > time.time() * 1000


def agent_row(live_view: LiveView, agent_name: str) -> AgentRow | None:
    """The row of an agent, None for an unknown one."""
    row = live_view.row(REGISTRY_AGENTS, agent_name)
    return row if isinstance(row, AgentRow) else None


def participant_row(live_view: LiveView, agent_name: str) -> ParticipantRow | None:
    """The row of a participant, None for one that never took part."""
    row = live_view.row(REGISTRY_PARTICIPANTS, agent_name)
    return row if isinstance(row, ParticipantRow) else None


def _evaluate(rules: Sequence[Callable[[Asked], str | None]], asked: Asked) -> PolicyResult:
    for rule in rules:
        why_not = rule(asked)
        if why_not is not None:
            return PolicyResult(allowed=False, reason=why_not)
    return PolicyResult(allowed=True)
