"""The records about what happens to messages in a mailbox: wire models and how a door makes the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from schemas.streams.control.organism import PER_MINUTE_MOST
from schemas.streams.mailboxes.message import DEFAULT_REALM, MESSAGE_POSTED, Message
from schemas.wire.ids import MAILBOX, stream_key
from schemas.wire.record import OutgoingRecord, content_id
from schemas.wire.strict_json import canonical
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
    realm: Name = DEFAULT_REALM
    recipient: Annotated[Name, Field(alias="to")]


class MailboxClaim(_MailboxBody):
    """Body of `message.claimed`: hand out up to `limit` messages, acknowledged at once. With `message_ids` only
    these, those of them that are pending: for a door that has handed them out by its own order.
    """

    request_id: Name
    limit: _Limit = CLAIM_LIMIT
    message_ids: Annotated[list[Name], Field(min_length=1, max_length=LIMIT_MOST)] | None = None


class MailboxLease(_MailboxBody):
    """Body of `message.leased`: hand out up to `limit` messages, to be acknowledged within `lease_ms`.

    With `message_ids` only these, those of them that may be handed out. Never so many that more than
    `held_most` are leased at once, or more than `per_minute` were handed out in the last 60 s of the log's
    time by leases that said so: the log is where all that share a mailbox meet. `from_closed`: out of a
    closed mailbox, by who sends back what is in it.
    """

    request_id: Name
    limit: _Limit = LEASE_LIMIT
    lease_ms: Annotated[int, Field(ge=1, le=LEASE_MS_MOST)] = LEASE_MS
    message_ids: Annotated[list[Name], Field(min_length=1, max_length=LIMIT_MOST)] | None = None
    held_most: _Limit | None = None
    per_minute: Annotated[int, Field(ge=1, le=PER_MINUTE_MOST)] | None = None
    from_closed: bool | None = None


class MailboxClearing(_MailboxBody):
    """Body of `mailbox.cleared`: drop all that is pending."""

    request_id: Name


class MailboxClosing(_MailboxBody):
    """Body of `mailbox.closed`: nothing is posted to it and nothing leased from it until it is opened again."""

    request_id: Name


class MailboxOpening(_MailboxBody):
    """Body of `mailbox.opened`: it is open again."""

    request_id: Name


class MessageAck(_MailboxBody):
    """Body of `message.acked`: its holder has done with it. `request_id` is the lease's. `answers` are the
    messages that it led to: in the same record, so that they are sent if and only if it counts.
    """

    message_id: Name
    request_id: Name
    answers: Annotated[list[Message], Field(max_length=ANSWERS_MOST)] | None = None


class MessageNack(_MailboxBody):
    """Body of `message.nacked`: its holder gives it back. `request_id` is the lease's. `is_no_attempt`: that it
    was handed out does not count as one.
    """

    message_id: Name
    request_id: Name
    reason: Note = ""
    is_no_attempt: bool | None = None


class MessageReclaim(_MailboxBody):
    """Body of `message.reclaimed`: the lease by the request `request_id` has run out."""

    message_id: Name
    request_id: Name


class MessageReading(_MailboxBody):
    """Body of `message.read`: marked as read by one that peeked."""

    message_id: Name


class MessageExpiry(_MailboxBody):
    """Body of `message.expired`: its `expires_at` has come."""

    message_id: Name


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
    realm: str, recipient: str, request_id: str, limit: int = CLAIM_LIMIT, *, door: str, principal: str
) -> OutgoingRecord:
    """The record that drains a mailbox. As all below, raises pydantic.ValidationError for a bad argument."""
    said = {"request_id": request_id, "limit": limit}
    return _record(MESSAGE_CLAIMED, realm, recipient, said, door, principal)


def claim_of_record(
    realm: str, recipient: str, request_id: str, message_ids: Sequence[str], *, door: str, principal: str
) -> OutgoingRecord:
    """The record that says that these messages, at most 1,000, were handed out by the door itself."""
    said = {"request_id": request_id, "limit": LIMIT_MOST, "message_ids": list(message_ids)}
    return _record(MESSAGE_CLAIMED, realm, recipient, said, door, principal)


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
    door: str,
    principal: str,
) -> OutgoingRecord:
    """The record that leases messages of a mailbox; see MailboxLease."""
    said = {
        "request_id": request_id,
        "limit": limit,
        "lease_ms": lease_ms,
        "message_ids": None if message_ids is None else list(message_ids),
        "held_most": held_most,
        "per_minute": per_minute,
        "from_closed": from_closed,
    }
    return _record(MESSAGE_LEASED, realm, recipient, said, door, principal)


def clearing_record(
    realm: str, recipient: str, request_id: str, *, door: str, principal: str
) -> OutgoingRecord:
    """The record that clears a mailbox."""
    return _record(MAILBOX_CLEARED, realm, recipient, {"request_id": request_id}, door, principal)


def gate_record(
    realm: str, recipient: str, request_id: str, *, is_open: bool, ce_id: str, door: str, principal: str
) -> OutgoingRecord:
    """The record that closes a mailbox, or opens it again. The reactor gives an id of its own."""
    kind = MAILBOX_OPENED if is_open else MAILBOX_CLOSED
    return _record(kind, realm, recipient, {"request_id": request_id}, door, principal, ce_id)


def ack_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    answers: Sequence[Message] | None = None,
    *,
    door: str,
    principal: str,
) -> OutgoingRecord:
    """The record that acknowledges a leased message. Door and principal are those of the lease."""
    said = {"message_id": message_id, "request_id": request_id, "answers": answers or None}
    return _record(MESSAGE_ACKED, realm, recipient, said, door, principal)


def nack_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    reason: str = "",
    *,
    is_no_attempt: bool | None = None,
    door: str,
    principal: str,
) -> OutgoingRecord:
    """The record that gives a leased message back. Door and principal are those of the lease."""
    said = {
        "message_id": message_id,
        "request_id": request_id,
        "reason": reason,
        "is_no_attempt": is_no_attempt,
    }
    return _record(MESSAGE_NACKED, realm, recipient, said, door, principal)


def reclaim_record(
    realm: str,
    recipient: str,
    message_id: str,
    request_id: str,
    *,
    door: str,
    principal: str,
    ce_id: str | None = None,
) -> OutgoingRecord:
    """The record that takes a message back whose lease has run out. The reactor gives an id of its own."""
    said = {"message_id": message_id, "request_id": request_id}
    return _record(MESSAGE_RECLAIMED, realm, recipient, said, door, principal, ce_id)


def read_record(realm: str, recipient: str, message_id: str, *, door: str, principal: str) -> OutgoingRecord:
    """The record that marks a message as read."""
    return _record(MESSAGE_READ, realm, recipient, {"message_id": message_id}, door, principal)


def expiry_record(
    realm: str, recipient: str, message_id: str, *, door: str, principal: str, ce_id: str | None = None
) -> OutgoingRecord:
    """The record that says that a message's time is over. The reactor gives an id of its own."""
    return _record(MESSAGE_EXPIRED, realm, recipient, {"message_id": message_id}, door, principal, ce_id)


def _record(
    record_type: str,
    realm: str,
    recipient: str,
    said: dict[str, Any],
    door: str,
    principal: str,
    ce_id: str | None = None,
) -> OutgoingRecord:
    """The id names sender, mailbox, message and request, and nothing else of what is said: the same request
    with other content has the same id, so that the fold can tell that it is a conflict.
    """
    body = MAILBOX_MODELS[record_type].model_validate({"realm": realm, "to": recipient, **said})
    mailbox = f"{realm}/{recipient}"
    identity = (f"{door}/{principal}", mailbox, said.get("message_id", ""), said.get("request_id", ""))
    return OutgoingRecord(
        stream=stream_key(MAILBOX, mailbox),
        ce_id=ce_id or content_id(record_type.encode(), *(part.encode() for part in identity)),
        door=door,
        principal=principal,
        type=record_type,
        # Without what is null: a field that comes later must not make a repeated request another one.
        value=canonical(body.model_dump(mode="json", by_alias=True, exclude_none=True)),
    )
