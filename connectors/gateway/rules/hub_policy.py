"""The hub's rules for tasks and messages (HH-09), beyond the access policy of `connectors.gateway.web.policy`.

Routes call one function for each question. The answer is no unless every rule in the question's tuple agrees.
To add a rule, add a function to the tuple. It returns the reason of a refusal, or None.
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
from schemas.fold.view_rows import AgentRow, ParticipantRow, TokenRow
from schemas.streams.agents.agent_registry import DEFINED
from schemas.streams.principal.principals import ACTIVE, OPERATOR

Asked = TypeVar("Asked")


class PolicyResult(BaseModel):
    """The result of a policy check. `reason`: why it was refused; it quotes nothing that the caller sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allowed: bool
    reason: str = ""


@dataclass(frozen=True)
class TaskAssignment:
    """A request to give an agent a task. `agent`: the definition of the agent, None for an unknown name."""

    agent_name: str
    description: str
    agent: AgentRow | None


@dataclass(frozen=True)
class MessageSending:
    """A request to send a message of `kind`."""

    sender: Caller
    recipient: str
    kind: str
    recipient_is_known: bool


def _agent_is_registered(asked: TaskAssignment) -> str | None:
    return None if asked.agent is not None and asked.agent.status == DEFINED else "the agent is not registered"


def _task_has_description(asked: TaskAssignment) -> str | None:
    return None if asked.description.strip() else "the task has no description"


def _recipient_is_known(asked: MessageSending) -> str | None:
    return None if asked.recipient_is_known else "no recipient of this name is known"


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
    """Decide whether the agent may be given the task."""
    agent = live_view.get(AgentRow, agent_name)
    return _evaluate(TASK_RULES, TaskAssignment(agent_name, description, agent))


def evaluate_message(
    live_view: LiveView, sender: Caller, recipient: str, kind: str, *, per_token: bool = False
) -> PolicyResult:
    """Decide whether the message may go to the recipient.

    The gate (admission.py) has already checked the sender's token. `per_token`: whether each token has a
    mailbox.
    """
    known = is_known_recipient(live_view, recipient, per_token=per_token)
    return _evaluate(MESSAGE_RULES, MessageSending(sender, recipient, kind, known))


def is_known_recipient(live_view: LiveView, recipient: str, *, per_token: bool = False) -> bool:
    """Return whether a mailbox of this name exists.

    With `per_token` each valid token has a mailbox, too.
    """
    return has_mailbox(live_view.get, recipient) or (per_token and _is_of_valid_token(live_view, recipient))


def broadcast_recipients(live_view: LiveView, sender: str) -> list[str]:
    """Return the recipients of a broadcast: all participants and the operator, but not its sender."""
    names = {row.agent_name for row in live_view.all(ParticipantRow) if row.status != STOPPED}
    return sorted((names | {OPERATOR}) - {sender})


def _is_of_valid_token(live_view: LiveView, recipient: str) -> bool:
    token = live_view.get(TokenRow, recipient.rpartition(".")[2])
    if token is None or recipient != token_mailbox(token.agent_name, token.token_id):
        return False
    return token.status == ACTIVE and token.expiry > time.time() * 1000


def _evaluate(rules: Sequence[Callable[[Asked], str | None]], asked: Asked) -> PolicyResult:
    for rule in rules:
        why_not = rule(asked)
        if why_not is not None:
            return PolicyResult(allowed=False, reason=why_not)
    return PolicyResult(allowed=True)
