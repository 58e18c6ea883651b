"""Functions that build the records about claims, leases, acks and other steps of a message.

The functions return records that are ready to append. They raise pydantic.ValidationError for an invalid
argument. `origin` is `door`, which appends the record, and `principal`, which made the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from schemas.streams.mailboxes.mailbox_bodies import (
    CLAIM_LIMIT,
    LEASE_LIMIT,
    LEASE_MS,
    LIMIT_MOST,
    MAILBOX_CLEARED,
    MAILBOX_CLOSED,
    MAILBOX_LIMITED,
    MAILBOX_MODELS,
    MAILBOX_OPENED,
    MESSAGE_ACKED,
    MESSAGE_CLAIMED,
    MESSAGE_DUE,
    MESSAGE_EXPIRED,
    MESSAGE_EXTENDED,
    MESSAGE_LEASED,
    MESSAGE_NACKED,
    MESSAGE_READ,
    MESSAGE_RECLAIMED,
    HandledMessage,
    MessagesHandled,
)
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import Origin, OutgoingRecord


def claim_record(
    realm: str,
    recipient: str,
    request_id: str,
    limit: int = CLAIM_LIMIT,
    *,
    bytes_most: int | None = None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record `message.claimed`, ready to append, which hands out messages of a mailbox for good.

    The messages need no ack.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        request_id: the id of the request. A repeated request has the same id.
        limit: the largest number of messages to hand out, 1 to 1,000.
        bytes_most: the largest number of bytes of their bodies. One message comes in any case. `None` means no
            limit.
        origin: `door`, which appends the record, and `principal`, which gets the messages.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    said = {"request_id": request_id, "limit": limit, "bytes_most": bytes_most}
    return _record(MESSAGE_CLAIMED, realm, recipient, said, origin)


def claim_of_record(
    realm: str,
    recipient: str,
    request_id: str,
    message_ids: Sequence[str],
    *,
    if_unread: bool | None = None,
    ce_id: str | None = None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record `message.claimed`, ready to append, for the messages `message_ids` of one mailbox.

    A door uses it to record messages that it has already handed out.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        request_id: the id of the request. A repeated request has the same id.
        message_ids: 1 to 1,000 ids. The fold ignores messages that are not pending, and rejects the record if
            it knows none of them.
        if_unread: whether the fold also ignores messages that are leased or have expired. `None` means no.
        ce_id: the CloudEvents id. `None` means one derived from `origin` and the request.
        origin: `door`, which appends the record, and `principal`, which got the messages.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    named = {"message_ids": list(message_ids), "if_unread": if_unread}
    said = {"request_id": request_id, "limit": LIMIT_MOST, **named}
    return _record(MESSAGE_CLAIMED, realm, recipient, said, origin, ce_id)


def lease_record(
    realm: str,
    recipient: str,
    request_id: str,
    limit: int = LEASE_LIMIT,
    lease_ms: int = LEASE_MS,
    *,
    message_ids: Sequence[str] | None = None,
    held_most: int | None = None,
    per_minute: int | None = None,
    from_closed: bool | None = None,
    attempts_most: int | None = None,
    bytes_most: int | None = None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record `message.leased`, ready to append, which hands out messages for a limited time.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        request_id: the id of the request. A repeated request has the same id, and acks need it.
        limit: the largest number of messages to hand out.
        lease_ms: the duration of the lease in milliseconds. Messages without an ack may then be handed out
            again.
        message_ids: the only messages that may be handed out. `None` means all.
        held_most: the largest number of messages that may be leased at once. `None` means no limit.
        per_minute: the largest number of messages that such leases hand out in 60 s. `None` means no limit.
        from_closed: whether to lease even if the mailbox is closed. `None` means no.
        attempts_most: how often each message may be handed out before it is dead, 1 to 1,000. `None` means
            three times.
        bytes_most: the largest number of bytes of their bodies, as in `claim_record`.
        origin: `door`, which appends the record, and `principal`, which leases the messages.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    said = {
        "request_id": request_id,
        "limit": limit,
        "lease_ms": lease_ms,
        "message_ids": None if message_ids is None else list(message_ids),
        "held_most": held_most,
        "per_minute": per_minute,
        "from_closed": from_closed,
        "attempts_most": attempts_most,
        "bytes_most": bytes_most,
    }
    return _record(MESSAGE_LEASED, realm, recipient, said, origin)


def clearing_record(realm: str, recipient: str, request_id: str, **origin: Unpack[Origin]) -> OutgoingRecord:
    """Return the record `mailbox.cleared`, ready to append, which ends all pending messages as `cleared`.

    The mailbox is that of `recipient` in `realm`. `request_id` identifies the request; a repeated request has
    the same id. `origin` is `door`, which appends the record, and `principal`, which made the request. Raises
    pydantic.ValidationError for an invalid argument.
    """
    return _record(MAILBOX_CLEARED, realm, recipient, {"request_id": request_id}, origin)


def gate_record(
    realm: str, recipient: str, request_id: str, *, is_open: bool, ce_id: str, **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return a record, ready to append, that closes a mailbox for postings and leases or opens it again.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        request_id: the id of the request. A repeated request has the same id.
        is_open: true opens the mailbox, false closes it.
        ce_id: the CloudEvents id, which the reactor derives from the record that caused the change.
        origin: `door`, which appends the record, and `principal`, which caused it.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    kind = MAILBOX_OPENED if is_open else MAILBOX_CLOSED
    return _record(kind, realm, recipient, {"request_id": request_id}, origin, ce_id)


def limits_record(
    realm: str,
    recipient: str,
    request_id: str,
    *,
    pending_most: int | None,
    bytes_most: int | None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record `mailbox.limited`, ready to append, which sets the limits of a mailbox's own.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        request_id: the id of the request. A repeated request has the same id.
        pending_most: the largest number of messages without a final status. `None` means no limit of its own.
        bytes_most: the largest number of bytes of their bodies. `None` means no limit of its own.
        origin: `door`, which appends the record, and `principal`, which sets the limits.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    said = {"request_id": request_id, "pending_most": pending_most, "bytes_most": bytes_most}
    return _record(MAILBOX_LIMITED, realm, recipient, said, origin)


def ack_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    answers: Sequence[Message] | None = None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record `message.acked`, ready to append, by which a reader acknowledges a message it leased.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        message_id: the id of the leased message.
        request_id: the `request_id` of the lease.
        answers: messages to send if the ack is accepted. `None` means none.
        origin: the door and principal of the lease. The fold rejects the record for any other.

    Raises:
        pydantic.ValidationError: an argument is invalid, or there are more than 100 answers.
    """
    said = {"message_id": message_id, "request_id": request_id, "answers": answers or None}
    return _record(MESSAGE_ACKED, realm, recipient, said, origin)


def handled_record(
    realm: str, recipient: str, messages: Sequence[HandledMessage], **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record `message.handled`, ready to append, which acknowledges several messages of a mailbox.

    The fold accepts all of these acknowledgements or none. The record's id depends on the ids of the messages
    and of their leases alone.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        messages: 1 to 100 messages, each with the `request_id` of its lease and the answers to send.
        origin: the door and principal of the leases. The fold rejects the record for any other.

    Raises:
        pydantic.ValidationError: an argument is invalid, or a message is named twice.
    """
    named = {"realm": realm, "to": recipient, "messages": list(messages)}
    body = MessagesHandled.model_validate(named)
    return body.record(**origin)


def nack_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    reason: str = "",
    *,
    is_no_attempt: bool | None = None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record `message.nacked`, ready to append, by which a reader gives back a message it leased.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        message_id: the id of the leased message.
        request_id: the `request_id` of the lease.
        reason: a short explanation, which may be empty.
        is_no_attempt: whether this lease does not count as an attempt. A message is dead after those that its
            lease allows. `None` means no.
        origin: the door and principal of the lease. The fold rejects the record for any other.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    said = {
        "message_id": message_id,
        "request_id": request_id,
        "reason": reason,
        "is_no_attempt": is_no_attempt,
    }
    return _record(MESSAGE_NACKED, realm, recipient, said, origin)


def extension_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    lease_ms: int,
    *,
    ce_id: str,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record `message.extended`, ready to append, which sets a new end for the lease of a message.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        message_id: the id of the leased message.
        request_id: the `request_id` of the lease.
        lease_ms: the time from the record to the new end, in milliseconds. It may shorten the lease.
        ce_id: the CloudEvents id. A repeated request has the same one, and each further extension another one.
        origin: the door and principal of the lease. The fold rejects the record for any other, and after the
            end of the lease.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    said = {"message_id": message_id, "request_id": request_id, "lease_ms": lease_ms}
    return _record(MESSAGE_EXTENDED, realm, recipient, said, origin, ce_id)


def reclaim_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    *,
    ce_id: str | None = None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record `message.reclaimed`, ready to append, which ends the expired lease of a message.

    Afterwards the message is unread, or dead after three attempts. The fold rejects the record if the lease has
    not expired.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        message_id: the id of the leased message.
        request_id: the `request_id` of the lease.
        ce_id: the CloudEvents id, which the reactor chooses. `None` means one derived from `origin` and the
            other arguments.
        origin: `door`, which appends the record, and `principal`, which caused it.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    said = {"message_id": message_id, "request_id": request_id}
    return _record(MESSAGE_RECLAIMED, realm, recipient, said, origin, ce_id)


def read_record(realm: str, recipient: str, message_id: str, **origin: Unpack[Origin]) -> OutgoingRecord:
    """Return the record `message.read`, ready to append, which ends a message with the status `read`.

    The message is in the mailbox of `recipient` in `realm`. The fold rejects the record if the message is
    leased. `origin` is `door`, which appends the record, and `principal`, which read the message. Raises
    pydantic.ValidationError for an invalid argument.
    """
    return _record(MESSAGE_READ, realm, recipient, {"message_id": message_id}, origin)


def due_record(
    realm: str, recipient: str, message_id: str, *, ce_id: str, **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record `message.due`, ready to append, which delivers a delayed message to its mailbox.

    The message is for the mailbox of `recipient` in `realm`. The fold rejects the record before `deliver_at`.
    `ce_id` is the CloudEvents id that the reactor chooses. `origin` is `door`, which appends the record, and
    `principal`, which caused it. Raises pydantic.ValidationError for an invalid argument.
    """
    return _record(MESSAGE_DUE, realm, recipient, {"message_id": message_id}, origin, ce_id)


def expiry_record(
    realm: str, recipient: str, message_id: str, *, ce_id: str | None = None, **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record `message.expired`, ready to append, which ends a message whose `expires_at` has passed.

    The message is in the mailbox of `recipient` in `realm`. The fold rejects the record if the message is
    leased or has not expired. `ce_id` is the CloudEvents id that the reactor chooses. `None` means one derived
    from the other arguments. `origin` is `door`, which appends the record, and `principal`, which caused it.
    Raises pydantic.ValidationError for an invalid argument.
    """
    return _record(MESSAGE_EXPIRED, realm, recipient, {"message_id": message_id}, origin, ce_id)


def _record(
    record_type: str,
    realm: str,
    recipient: str,
    said: dict[str, Any],
    origin: Origin,
    ce_id: str | None = None,
) -> OutgoingRecord:
    """Return a record. Its id depends on the sender, the mailbox, the message and the request alone.

    The same request with other content has the same id, so that the fold recognises the conflict.
    """
    body = MAILBOX_MODELS[record_type].model_validate({"realm": realm, "to": recipient, **said})
    return body.record(ce_id=ce_id, **origin)
