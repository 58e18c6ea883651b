"""The records about claims, leases, acks and the other steps of a message.

This module has their wire models and the functions that build them. The functions raise
pydantic.ValidationError for an invalid argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Unpack

from pydantic import Field

from schemas.streams.control.organism import PER_MINUTE_MOST
from schemas.streams.mailboxes.message import DEFAULT_REALM, MESSAGE_POSTED, Message
from schemas.wire.ids import MAILBOX, stream_key
from schemas.wire.record import Origin, OutgoingRecord
from schemas.wire.wire_body import Name, Note, WireBody

MESSAGE_CLAIMED: Final = "message.claimed"
MESSAGE_LEASED: Final = "message.leased"
MESSAGE_ACKED: Final = "message.acked"
MESSAGE_NACKED: Final = "message.nacked"
MESSAGE_RECLAIMED: Final = "message.reclaimed"
MESSAGE_READ: Final = "message.read"
MESSAGE_EXPIRED: Final = "message.expired"
MAILBOX_CLEARED: Final = "mailbox.cleared"
MAILBOX_CLOSED: Final = "mailbox.closed"
MAILBOX_OPENED: Final = "mailbox.opened"

CLAIM_LIMIT: Final = 100
LEASE_LIMIT: Final = 1
LIMIT_MOST: Final = 1000
LEASE_MS: Final = 30_000
LEASE_MS_MOST: Final = 86_400_000
ANSWERS_MOST: Final = 100

_Limit = Annotated[int, Field(ge=1, le=LIMIT_MOST)]


class _MailboxBody(WireBody):
    OMITS_NULLS: ClassVar = True

    realm: Name = DEFAULT_REALM
    recipient: Annotated[Name, Field(alias="to")]


class _MailboxRequest(_MailboxBody):
    request_id: Name


class _MessageBody(_MailboxBody):
    message_id: Name


class _LeaseEnd(_MessageBody):
    request_id: Name


class MailboxClaim(_MailboxRequest):
    """Body of `message.claimed`: hand out up to `limit` messages and acknowledge them at once.

    With `message_ids`, only the pending ones of these are claimed. A door that has already handed them out
    records them in this way.
    """

    limit: _Limit = CLAIM_LIMIT
    message_ids: Annotated[list[Name], Field(min_length=1, max_length=LIMIT_MOST)] | None = None


class MailboxLease(_MailboxRequest):
    """Body of `message.leased`: hand out up to `limit` messages, which must be acknowledged within `lease_ms`.

    The limits apply to all readers of the mailbox together, because the fold counts in the log.

    Attributes:
        message_ids: the only messages that may be handed out. `None` means all.
        held_most: the largest number of messages that may be leased at once. `None` means no limit.
        per_minute: the largest number of messages that leases with this field may hand out in 60 s of the log's
            time. `None` means no limit.
        from_closed: whether to lease from a closed mailbox, to return its messages to their senders.
    """

    limit: _Limit = LEASE_LIMIT
    lease_ms: Annotated[int, Field(ge=1, le=LEASE_MS_MOST)] = LEASE_MS
    message_ids: Annotated[list[Name], Field(min_length=1, max_length=LIMIT_MOST)] | None = None
    held_most: _Limit | None = None
    per_minute: Annotated[int, Field(ge=1, le=PER_MINUTE_MOST)] | None = None
    from_closed: bool | None = None


class MailboxClearing(_MailboxRequest):
    """Body of `mailbox.cleared`: drop all pending messages."""


class MailboxClosing(_MailboxRequest):
    """Body of `mailbox.closed`: reject postings and leases until the mailbox is opened again."""


class MailboxOpening(_MailboxRequest):
    """Body of `mailbox.opened`: the mailbox is open again."""


class MessageAck(_LeaseEnd):
    """Body of `message.acked`: the holder of the lease has finished the message.

    `request_id` is that of the lease. `answers` are the messages that result from it. They are in the same
    record so that they are sent if and only if the ack is accepted.
    """

    answers: Annotated[list[Message], Field(max_length=ANSWERS_MOST)] | None = None


class MessageNack(_LeaseEnd):
    """Body of `message.nacked`: the holder of the lease returns the message.

    `request_id` is that of the lease. With `is_no_attempt`, the lease does not count as an attempt.
    """

    reason: Note = ""
    is_no_attempt: bool | None = None


class MessageReclaim(_LeaseEnd):
    """Body of `message.reclaimed`: the lease by the request `request_id` has expired."""


class MessageReading(_MessageBody):
    """Body of `message.read`: a client that only looked at the message marks it as read."""


class MessageExpiry(_MessageBody):
    """Body of `message.expired`: the time `expires_at` of the message has passed."""


MAILBOX_MODELS: Final[dict[str, type[WireBody]]] = {
    MESSAGE_POSTED: Message,
    MESSAGE_CLAIMED: MailboxClaim,
    MESSAGE_LEASED: MailboxLease,
    MESSAGE_ACKED: MessageAck,
    MESSAGE_NACKED: MessageNack,
    MESSAGE_RECLAIMED: MessageReclaim,
    MESSAGE_READ: MessageReading,
    MESSAGE_EXPIRED: MessageExpiry,
    MAILBOX_CLEARED: MailboxClearing,
    MAILBOX_CLOSED: MailboxClosing,
    MAILBOX_OPENED: MailboxOpening,
}


def claim_record(
    realm: str, recipient: str, request_id: str, limit: int = CLAIM_LIMIT, **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record that claims up to `limit` messages of a mailbox."""
    said = {"request_id": request_id, "limit": limit}
    return _record(MESSAGE_CLAIMED, realm, recipient, said, origin)


def claim_of_record(
    realm: str, recipient: str, request_id: str, message_ids: Sequence[str], **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record that claims these messages, at most 1,000, which the door has already handed out."""
    said = {"request_id": request_id, "limit": LIMIT_MOST, "message_ids": list(message_ids)}
    return _record(MESSAGE_CLAIMED, realm, recipient, said, origin)


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
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record that leases messages of a mailbox. `MailboxLease` describes the conditions."""
    said = {
        "request_id": request_id,
        "limit": limit,
        "lease_ms": lease_ms,
        "message_ids": None if message_ids is None else list(message_ids),
        "held_most": held_most,
        "per_minute": per_minute,
        "from_closed": from_closed,
    }
    return _record(MESSAGE_LEASED, realm, recipient, said, origin)


def clearing_record(realm: str, recipient: str, request_id: str, **origin: Unpack[Origin]) -> OutgoingRecord:
    """Return the record that drops all pending messages of a mailbox."""
    return _record(MAILBOX_CLEARED, realm, recipient, {"request_id": request_id}, origin)


def gate_record(
    realm: str, recipient: str, request_id: str, *, is_open: bool, ce_id: str, **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record that closes a mailbox, or opens it again. The reactor chooses `ce_id`."""
    kind = MAILBOX_OPENED if is_open else MAILBOX_CLOSED
    return _record(kind, realm, recipient, {"request_id": request_id}, origin, ce_id)


def ack_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    answers: Sequence[Message] | None = None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record that acknowledges a leased message. Door and principal must be those of the lease."""
    said = {"message_id": message_id, "request_id": request_id, "answers": answers or None}
    return _record(MESSAGE_ACKED, realm, recipient, said, origin)


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
    """Return the record that returns a leased message. Door and principal must be those of the lease."""
    said = {
        "message_id": message_id,
        "request_id": request_id,
        "reason": reason,
        "is_no_attempt": is_no_attempt,
    }
    return _record(MESSAGE_NACKED, realm, recipient, said, origin)


def reclaim_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    *,
    ce_id: str | None = None,
    **origin: Unpack[Origin],
) -> OutgoingRecord:
    """Return the record that makes a message with an expired lease unread. The reactor chooses `ce_id`."""
    said = {"message_id": message_id, "request_id": request_id}
    return _record(MESSAGE_RECLAIMED, realm, recipient, said, origin, ce_id)


def read_record(realm: str, recipient: str, message_id: str, **origin: Unpack[Origin]) -> OutgoingRecord:
    """Return the record that marks a message as read."""
    return _record(MESSAGE_READ, realm, recipient, {"message_id": message_id}, origin)


def expiry_record(
    realm: str, recipient: str, message_id: str, *, ce_id: str | None = None, **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record that ends an expired message. The reactor chooses `ce_id`."""
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
    mailbox = f"{realm}/{recipient}"
    request = (mailbox, said.get("message_id", ""), said.get("request_id", ""))
    return body.record(record_type, stream_key(MAILBOX, mailbox), *request, ce_id=ce_id, **origin)
