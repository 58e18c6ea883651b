"""The records that follow from those of a mailbox, or when the time of a message has come (DL-21, DL-22).

A message to one of Trunkline's own principals is read at once. A message may complete its sender's task
(HH-07).

The messages of an agent on MQTT are posted, and it gets a notice if one is refused. The messages that it
confirms are claimed (JE-26).
"""

from __future__ import annotations

from typing import Any, Final

from schemas.effects.following import BY_REACTOR, Cause, Follows, GetRow, Timer, derived_id
from schemas.effects.recipients import has_mailbox, limits_of
from schemas.effects.topic_effects import END_OF_MAILBOX
from schemas.streams.agents.mqtt_agents import AGENT_CONFIRMED, AGENT_SAID, body_text
from schemas.streams.mailboxes.mailbox_bodies import (
    LIMIT_MOST,
    MESSAGE_DUE,
    MESSAGE_EXPIRED,
    MESSAGE_RECLAIMED,
    MailboxClaim,
    MessageDue,
    MessageExpiry,
    MessageReading,
    MessageReclaim,
)
from schemas.streams.mailboxes.message import (
    DEFAULT_REALM,
    DELAYED,
    LEASED,
    MESSAGE_PENDING,
    MESSAGE_POSTED,
    Message,
    MessageBodyRow,
    MessageRow,
    milliseconds_of,
    verified_message,
)
from schemas.streams.mailboxes.pending_message import is_lease_held, is_of_a_wrong_clock
from schemas.streams.principal.principals import HUB, SENDER
from schemas.streams.task.task_registry import RESULT_LIMIT_BYTES, TASK_COMPLETED, TaskCompletion, result_text
from schemas.wire.record import JSON_CONTENT, OutgoingRecord
from trunkline_agent.wire.ids import MAILBOX, stream_key
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS
from trunkline_agent.wire.moments import has_come, moment_of
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode
from trunkline_agent.wire.verdicts import ACCEPTED, MAILBOX_FULL, REJECTED, UNKNOWN_RECIPIENT

MQTT_DOOR: Final = "mqtt"
_UNDELIVERABLE: Final = "undeliverable"
_MINUTE_US: Final = 60_000_000


def message_from_hub(
    recipient: str, kind: str, body: dict[str, Any], message_id: str, in_reply_to: str | None = None
) -> OutgoingRecord:
    """Return the record that posts a message from the sender `trunkline` to a mailbox of the realm `default`.

    A full mailbox takes it, too.

    Args:
        recipient: the name of the recipient. The mailbox is `default/<recipient>`.
        kind: The type of the message, such as `job.completed`.
        body: The payload of the message, which becomes JSON.
        message_id: The id of the message, see `notifications`.
        in_reply_to: The id of the message that this one answers; None if it answers none.

    Raises:
        pydantic.ValidationError: An argument breaks the rules of messages, such as a name with a space.
    """
    text = canonical(body).decode("utf-8")
    about = {"in_reply_to": in_reply_to, "unlimited": True}
    message = verified_message(message_id, SENDER, recipient, kind, text, JSON_CONTENT, **about)
    return message.record(**BY_REACTOR)


def system_readings(reader: str, message_id: str, mailbox: str, get: GetRow) -> list[OutgoingRecord]:
    """Return the record that marks a new message to one of Trunkline's own principals as read, in a list.

    No client ever drains the mailbox of such a principal. The list is empty if the message is in another
    mailbox, was not accepted, or already has a final status.

    Args:
        reader: The principal: `hub` or `system`.
        message_id: The id of the new message.
        mailbox: The mailbox that the message was posted to, as `<realm>/<recipient>`.
        get: The look-up of rows, such as `LiveView.get`. The rows must include the new message.
    """
    posted = get(MessageRow, f"{mailbox}/{message_id}") if mailbox == f"{DEFAULT_REALM}/{reader}" else None
    if posted is None or posted.status not in MESSAGE_PENDING:
        return []
    return [MessageReading(to=reader, message_id=message_id).record(**BY_REACTOR)]


def undeliverable(agent: str, message_id: str, recipient: str, reason: str, cause: str) -> OutgoingRecord:
    """Return the notice to an agent on MQTT that its message was not delivered. `cause` determines its id."""
    body = {"message_id": message_id, "to": recipient, "reason": reason}
    return message_from_hub(agent, _UNDELIVERABLE, body, derived_id(cause, _UNDELIVERABLE), message_id)


def _reading(cause: Cause) -> list[OutgoingRecord]:
    return system_readings(HUB, cause.id, cause.name, cause.get)


def _reading_of_delivered(cause: Cause) -> list[OutgoingRecord]:
    """Return what `_reading` does for a message to the hub that was delayed until now."""
    due = cause.body_as(MessageDue) if cause.name == f"{DEFAULT_REALM}/{HUB}" else None
    return [] if due is None else system_readings(HUB, due.message_id, cause.name, cause.get)


def _completion(cause: Cause) -> list[OutgoingRecord]:
    """Complete the sender's task if the payload of a message says that it is done (HH-07)."""
    # Few messages contain this text, and all pass here.
    if cause.record.value is None or TASK_COMPLETED.encode() not in cause.record.value:
        return []
    message = cause.body_as(Message)
    # The message that a replay repeats has completed the task. A message to a topic is no report to anybody.
    if message is None or message.replay_of is not None or message.topic is not None:
        return []
    text = completes_a_task(message.body)
    if text is None or message.from_task is None or not message.from_verified:
        return []
    # Only the accepted message counts, not another one under an id that is taken.
    body = cause.get(MessageBodyRow, f"{cause.name}/{message.message_id}")
    posted = cause.get(MessageRow, f"{cause.name}/{message.message_id}")
    if body is None or posted is None:
        return []
    accepted = (posted.sender, posted.from_task, posted.kind, body.body)
    if accepted != (message.sender, message.from_task, message.kind, message.body):
        return []
    ce_id = derived_id(message.message_id, TASK_COMPLETED)
    completion = TaskCompletion(task_id=message.from_task, request_id=ce_id, result=_shortened(text))
    return [completion.record(ce_id=ce_id, **BY_REACTOR)]


def completes_a_task(body: str) -> str | None:
    """Return the result of a task if `body`, a message's payload, reports that the sender's task is completed.

    Such a payload is a JSON object with `"event": "task.completed"`. Its field `result` is returned as text: a
    string unchanged, another value as JSON, and an empty string if the field is missing. None means that the
    payload reports no completed task.
    """
    try:
        payload = decode(body.encode("utf-8"))[0]
    except MalformedJsonError:
        return None
    if type(payload) is not dict or payload.get("event") != TASK_COMPLETED:
        return None
    result = payload.get("result")
    return "" if result is None else result_text(result)


def _shortened(text: str) -> str:
    """Cut `text` to the limit of a result; the message has the whole text."""
    raw = text.encode("utf-8")
    return text if len(raw) <= RESULT_LIMIT_BYTES else raw[:RESULT_LIMIT_BYTES].decode("utf-8", "ignore")


def _refusal_over_mqtt(cause: Cause) -> list[OutgoingRecord]:
    """Notify an agent on MQTT that a mailbox has refused its message."""
    if cause.verdict != REJECTED:
        return []
    agent, message = cause.envelope.principal, f"{cause.name}/{cause.id}"
    if cause.reason == MAILBOX_FULL:
        # The sender has a receipt with the reason, unless that was too late. One notice a minute is enough.
        message = f"{cause.name}/{agent}/{cause.reason}/{cause.record.logged_at_us // _MINUTE_US}"
    return [undeliverable(agent, cause.id, cause.name.partition("/")[2], cause.reason or REJECTED, message)]


def _is_from_mqtt(cause: Cause) -> bool:
    """Return whether the record came over MQTT."""
    return cause.envelope.door == MQTT_DOOR


_POSTED: Final = frozenset({MESSAGE_POSTED})
MAILBOX_FOLLOWS: Final = (
    Follows(_POSTED, _completion),
    Follows(_POSTED, _reading),
    Follows(frozenset({MESSAGE_DUE}), _reading_of_delivered),
    Follows(_POSTED, _refusal_over_mqtt, _is_from_mqtt),
)


def _moment_of(row: MessageRow, now_us: int) -> int | None:
    """Return the end of the lease, the delivery or the expiry, in microseconds; `None` for a final status.

    A leased message becomes unread when its lease ends, or dead after its last attempt. It cannot expire before
    that. An unread or delayed message expires at `expires_at`. A delayed one becomes unread at `deliver_at`.
    """
    if row.ended_at is not None:
        return None
    if row.status == LEASED and row.lease_until is not None:
        is_wrong = row.lease_until > now_us and not is_lease_held(row.lease_until, now_us)
        return 0 if is_wrong else row.lease_until
    if row.status == DELAYED and is_of_a_wrong_clock(row.posted_at, now_us):
        return 0
    expiry = None if row.expires_at is None else moment_of(row.expires_at)
    delivery = row.deliver_at if row.status == DELAYED else None
    return min((at for at in (expiry, delivery) if at is not None), default=None)


def _record_of(row: MessageRow, now_us: int, _: GetRow) -> OutgoingRecord:
    """Return the record that takes the message back, delivers it or ends it as expired."""
    at: dict[str, Any] = {"realm": row.realm, "to": row.recipient, "message_id": row.message_id}
    if row.status == LEASED:
        lease = str(row.request_id)
        ce_id = derived_id(lease, f"{MESSAGE_RECLAIMED}/{row.key}")
        return MessageReclaim(**at, request_id=lease).record(ce_id=ce_id, **BY_REACTOR)
    # After a week another message may have the same id.
    cause = f"{row.key}/{row.posted_at}"
    if row.expires_at is not None and has_come(row.expires_at, now_us):
        return MessageExpiry(**at).record(ce_id=derived_id(cause, MESSAGE_EXPIRED), **BY_REACTOR)
    return MessageDue(**at).record(ce_id=derived_id(cause, MESSAGE_DUE), **BY_REACTOR)


MESSAGE_TIMER: Final = Timer(
    MessageRow, lambda row: stream_key(MAILBOX, f"{row.realm}/{row.recipient}"), _moment_of, _record_of
)


# The fields that an agent's message has in the mailbox, too.
_AS_SAID: Final = (*(one.name for one in MESSAGE_FIELDS), "priority")


def _delivery(cause: Cause) -> list[OutgoingRecord]:
    """Return the posting of the agent's message, or a message to the agent if the recipient is unknown."""
    if cause.verdict != ACCEPTED:
        return []
    agent, said = cause.name, cause.body
    refusal = undeliverable(agent, said["message_id"], said["to"], UNKNOWN_RECIPIENT, cause.id)
    if not _is_deliverable(agent, said, refusal.ce_id, cause.get):
        return [refusal]
    others: dict[str, Any] = {name: said[name] for name in _AS_SAID if name in said}
    others |= {
        "expires_in_ms": milliseconds_of(said.get("expires_in_s")),
        "deliver_after_ms": milliseconds_of(said.get("deliver_after_s")),
        **limits_of(cause.get, said["to"]).of_mailbox,
    }
    message = verified_message(
        said["message_id"], agent, said["to"], said["kind"], *body_text(said["body"]), **others
    )
    return [message.record(door=MQTT_DOOR, principal=agent)]


def _is_deliverable(agent: str, said: dict[str, Any], refusal_id: str, get: GetRow) -> bool:
    """Return whether the recipient is known; an earlier decision that the mailboxes show stays valid."""
    if get(MessageRow, f"{DEFAULT_REALM}/{agent}/{refusal_id}") is not None:
        return False
    if get(MessageRow, f"{DEFAULT_REALM}/{said['to']}/{said['message_id']}") is not None:
        return True
    return has_mailbox(get, said["to"])


def _claim(cause: Cause) -> list[OutgoingRecord]:
    """Return the claim of the messages that an agent has confirmed, under the id of the confirmation."""
    if cause.verdict != ACCEPTED:
        return []
    # By its position: the same ids may be of new messages after a week, and the same bytes confirm them.
    request = f"{cause.record.partition}-{cause.record.offset}"
    claim = MailboxClaim(
        to=cause.name, request_id=request, message_ids=list(cause.body["confirms"]), limit=LIMIT_MOST
    )
    return [claim.record(ce_id=cause.id, door=MQTT_DOOR, principal=cause.name)]


AGENT_FOLLOWS: Final = (
    END_OF_MAILBOX,
    Follows(frozenset({AGENT_SAID}), _delivery, _is_from_mqtt),
    Follows(frozenset({AGENT_CONFIRMED}), _claim, _is_from_mqtt),
)
