"""The hub's rules for messages, tasks and schedules beyond the access policy: policy, recipients and limits.

The policy (HH-09) has one function for each question. A function returns the first refusal, and allows the
request only when no rule refuses it. To add a rule, add a refusal to the function. The limits of messages, jobs
and subscriptions are those of LM-01, LM-02 and LM-04; the recipients of an XML message are those of XP-08.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, Unpack

from pydantic import BaseModel, ConfigDict

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowLists
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.audit_log import why_refused
from connectors.hub.services.hub import Hub
from connectors.hub.services.log_appender import gather_all
from connectors.hub.services.mailboxes import token_mailbox
from connectors.hub.serving.answers import ApiError, refuse_rejected, too_many
from connectors.hub.serving.identities import Origin
from connectors.hub.serving.policy import Caller
from connectors.plumbing.xml_wire.documents import Faulty
from schemas.effects.recipients import has_mailbox
from schemas.streams.agents.agent_registry import DEFINED, AgentRow
from schemas.streams.control.organism import ListenerRow
from schemas.streams.mailboxes.message import Message
from schemas.streams.principal.principals import ACTIVE, OPERATOR
from schemas.streams.refused.refusal import RefusalReason
from schemas.streams.schedule.schedule_registry import ScheduleRow
from schemas.streams.task.task_registry import TokenRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.verdicts import (
    LIMIT_REACHED,
    MAILBOX_FULL,
    POLICY,
    RATE_LIMITED,
    SEQ_CONFLICT,
    UNKNOWN_RECIPIENT,
)


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


ROUTING: Final = "routing"


def recipients_of(
    hub: Hub, sender: str, to: str | None, root_tag: str, namespace: str | None, also: Sequence[str] = ()
) -> list[str]:
    """Return the names of the mailboxes that an XML message goes to. The list is never empty.

    Args:
        hub: The hub.
        sender: The name of the sender. A listener that declares `visible_tools` can write only to the listeners
            named there.
        to: The recipient named in `<to>`. None means all active listeners of the root tag, except the sender.
        root_tag: The root tag of the payload.
        namespace: The XML namespace that the listeners must have; None for any. It is ignored if `to` is given.
        also: Further names that a sender with `visible_tools` can write to.

    Raises:
        Faulty: No recipient has the name `to`, the sender may not write to it, or no listener takes this root
            tag. The error says what would be right.
    """
    sees = hub.listeners.row(sender)
    visible = None if sees is None or sees.visible_tools is None else {*sees.visible_tools, *also}
    if to is not None:
        is_there = visible is None or to in visible
        if is_there and is_known_recipient(hub.live_view, to):
            return [to]
        why = "no recipient has the name in <to>"
        raise Faulty(ROUTING, why, expected="a name that you were given, or no <to>")
    found = [
        row
        for row in hub.listeners.of_tag(root_tag)
        if row.listener != sender and (visible is None or row.listener in visible)
    ]
    fitting = [row.listener for row in found if namespace is None or row.namespace == namespace]
    if found and not fitting:
        wanted = " or ".join(sorted({_clark(row) for row in found}))
        raise Faulty(ROUTING, f"<{root_tag}> is known, but in another namespace", expected=wanted)
    if not fitting:
        raise Faulty(ROUTING, f"no listener takes <{root_tag}>", expected="a payload that a listener takes")
    return fitting


def _clark(row: ListenerRow) -> str:
    return f'<{row.root_tag} xmlns="{row.namespace}">'


ROUTE: Final = "POST /api/hub/messages"
_REASONS: Final[dict[str, RefusalReason]] = {
    MAILBOX_FULL: "mailbox_full",
    RATE_LIMITED: "rate_limited",
    LIMIT_REACHED: "limit_reached",
}


def check_limits(hub: Hub, message: Message, route: str = ROUTE) -> None:
    """Count a new message among those of its sender, and check its recipient's mailbox.

    A refusal is recorded, at a bounded rate for each sender and `route`.

    Raises:
        ApiError: 429 with the reason `rate_limited` or `mailbox_full`.
    """
    with _recorded(hub, message.sender, route):
        hub.limits.check_room(message.recipient)
        hub.limits.check_rate(message.sender, len(message.body.encode()))


def check_rate(hub: Hub, sender: str, body_bytes: int, messages: int, route: str) -> None:
    """Count messages among those of their sender. `body_bytes` is the length of their bodies together in UTF-8.

    A refusal is recorded, at a bounded rate for each sender and `route`. Raises ApiError (429, `rate_limited`).
    """
    with _recorded(hub, sender, route):
        hub.limits.check_rate(sender, body_bytes, messages)


@contextmanager
def job_counted(hub: Hub, principal: str, route: str) -> Iterator[None]:
    """Count the registration of a job while the context is open, until the record is settled.

    A refusal is recorded, at a bounded rate. Raises ApiError (429, `limit_reached`).
    """
    with ExitStack() as counted:
        with _recorded(hub, principal, route):
            counted.enter_context(hub.limits.one_more_job(principal))
        yield


@contextmanager
def subscription_counted(hub: Hub, subscriber: str, principal: str, route: str) -> Iterator[None]:
    """Count a new subscription while the context is open, until the record is settled.

    A refusal is recorded, at a bounded rate for each `principal`, which asks for the subscription, and `route`.
    Raises ApiError (429, `limit_reached`).
    """
    with ExitStack() as counted:
        with _recorded(hub, principal, route):
            counted.enter_context(hub.limits.one_more_subscription(subscriber))
        yield


@contextmanager
def _recorded(hub: Hub, sender: str, route: str) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        hub.refusals.record(_REASONS[error.reason], str(error.detail), sender, route)
        raise


def limited_posting(hub: Hub, message: Message, **origin: Unpack[Origin]) -> OutgoingRecord:
    """Return the record that posts a message, with the limits of its recipient's mailbox."""
    return message.record(limits=hub.limits.of(message.recipient).of_mailbox, **origin)


def note_full(hub: Hub, message: Message, settled: SettledRecord) -> None:
    """Let the gateway refuse more messages to a mailbox for a second, if the fold called it full."""
    if settled.reason == MAILBOX_FULL:
        hub.limits.note_full(message.recipient)


def keep_mailbox(hub: Hub, message: Message) -> None:
    """Let no other request of this gateway send a message of the same id to another mailbox meanwhile.

    The fold cannot find this conflict, because each mailbox only knows its own ids. Remove the id from
    `hub.under_way.mailboxes` when the message is settled. Raises ApiError (409).
    """
    message_id, mailbox = message.message_id, (message.realm, message.recipient)
    under_way = hub.under_way.mailboxes
    if (hub.mailboxes.mailbox_of(message_id) or under_way.get(message_id, mailbox)) != mailbox:
        raise ApiError(409, SEQ_CONFLICT, "this idempotency key was used for another recipient")
    under_way[message_id] = mailbox


async def post_message(hub: Hub, message: Message, origin: Origin) -> SettledRecord:
    """Append a message with the limits of its recipient's mailbox, and return the settled record.

    Raises:
        ApiError: The fold rejected the record: 429 with the reason `mailbox_full`, or another one. 409 if a
            message with this id, which comes from an idempotency key, is or is being sent to another mailbox.
        BackboneUnreachable: Kafka is unreachable, or the record was not settled in time.
    """
    async with hub.under_way.one(message.sender):
        keep_mailbox(hub, message)
        try:
            settled = await hub.appender.settle(limited_posting(hub, message, **origin))
        finally:
            hub.under_way.mailboxes.pop(message.message_id, None)
    note_full(hub, message, settled)
    return refuse_rejected(settled)


async def post_to_all(hub: Hub, messages: Sequence[Message], origin: Origin) -> tuple[list[str], int]:
    """Append messages to several mailboxes, and return the verdicts and the number of full mailboxes.

    Each record is made when it is appended, and only its verdict is kept, so few bodies are in memory. A full
    mailbox keeps no other from its message. Raises ApiError if the fold rejects a message for another reason,
    and BackboneUnreachable as `post_message` does; some messages may have been sent then.
    """

    async def post(message: Message) -> str | None:
        try:
            return (await post_message(hub, message, origin)).verdict
        except ApiError as error:
            if error.reason == MAILBOX_FULL:
                return None
            raise

    found = await gather_all(post(message) for message in messages)
    verdicts = [one for one in found if one is not None]
    return verdicts, len(found) - len(verdicts)


def check_message(hub: Hub, caller: Caller, recipient: str, kind: str, route: str) -> None:
    """Raise ApiError if a client may not send a message, and append a record of the refusal to the log.

    The status is 404 for an unknown recipient, and 403 for any other reason.

    Args:
        hub: The hub.
        caller: The client.
        recipient: The name of the mailbox.
        kind: The type of the message.
        route: Method and path template of the route, for the record.
    """
    if hub.names.of(has_mailbox, recipient) and evaluate_publication(kind).allowed:
        return
    at_us = tokens_at_us(hub)
    decision = evaluate_message(hub.live_view, caller, recipient, kind, tokens_at_us=at_us)
    if decision.allowed:
        return
    why = why_refused({"recipient": recipient, "type": kind}, decision.reason)
    if not is_known_recipient(hub.live_view, recipient, tokens_at_us=at_us):
        hub.refusals.record(UNKNOWN_RECIPIENT, why, caller.principal, route)
        raise ApiError(404, UNKNOWN_RECIPIENT, decision.reason)
    hub.refusals.record(POLICY, why, caller.principal, route)
    raise ApiError(403, POLICY, decision.reason)


def check_room(hub: Hub, sender: str, recipient: str) -> None:
    """Raise ApiError (429) if one more message from `sender` would exceed the queue limits of a listener.

    `recipient` is the listener's name. There is a limit for all messages that wait for the listener, and one
    for each sender. A sender that has no waiting message is always admitted, because other senders filled the
    queue.
    """
    limits, mine = hub.settings.xml_pump, hub.listeners.waiting_of(recipient, sender)
    if mine and hub.listeners.waiting(recipient) >= limits.pending_most:
        raise too_many("too many messages wait for the listener")
    if mine >= limits.pending_per_sender:
        raise too_many("too many messages of this sender wait for the listener")
