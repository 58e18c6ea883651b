"""The checks before a message, job or subscription: policy and limits (HH-09, LM-01, LM-02, LM-04, XP-08)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, Unpack

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.audit_log import why_refused
from connectors.hub.services.hub import Hub
from connectors.hub.services.log_appender import gather_all
from connectors.hub.serving.answers import ApiError, refuse_rejected, too_many
from connectors.hub.serving.identities import Origin
from connectors.hub.serving.policy import Caller
from connectors.operations.rules.hub_policy import (
    evaluate_message,
    evaluate_publication,
    is_known_recipient,
    tokens_at_us,
)
from schemas.effects.recipients import has_mailbox
from schemas.streams.mailboxes.message import Message
from schemas.streams.refused.refusal import RefusalReason
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.verdicts import (
    LIMIT_REACHED,
    MAILBOX_FULL,
    POLICY,
    RATE_LIMITED,
    SEQ_CONFLICT,
    UNKNOWN_RECIPIENT,
)

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
