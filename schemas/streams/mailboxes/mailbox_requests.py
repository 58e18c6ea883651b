"""The records about claims, leases, acks and other steps of a message: bodies, and functions to build them.

The functions return records that are ready to append. They raise pydantic.ValidationError for an invalid
argument. `origin` is `door`, which appends the record, and `principal`, which made the request.
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
    """Body of `message.claimed`: hand out up to `limit` messages for good. They need no ack.

    With `message_ids`, only these messages are claimed, if they are pending. A door that has already handed out
    messages records the fact in this way.
    """

    limit: _Limit = CLAIM_LIMIT
    message_ids: Annotated[list[Name], Field(min_length=1, max_length=LIMIT_MOST)] | None = None


class MailboxLease(_MailboxRequest):
    """Body of `message.leased`: hand out up to `limit` messages, which must be acknowledged within `lease_ms`.

    `held_most` and `per_minute` count the messages of all readers of the mailbox together.

    Attributes:
        message_ids: the only messages that may be handed out. `None` means all.
        held_most: the largest number of messages that may be leased at once. `None` means no limit.
        per_minute: the largest number of messages that leases with this field may hand out in 60 s of the log's
            time. `None` means no limit.
        from_closed: whether to lease even if the mailbox is closed, to return its messages to their senders.
    """

    limit: _Limit = LEASE_LIMIT
    lease_ms: Annotated[int, Field(ge=1, le=LEASE_MS_MOST)] = LEASE_MS
    message_ids: Annotated[list[Name], Field(min_length=1, max_length=LIMIT_MOST)] | None = None
    held_most: _Limit | None = None
    per_minute: Annotated[int, Field(ge=1, le=PER_MINUTE_MOST)] | None = None
    from_closed: bool | None = None


class MailboxClearing(_MailboxRequest):
    """Body of `mailbox.cleared`: all pending messages of the mailbox end with the status `cleared`."""


class MailboxClosing(_MailboxRequest):
    """Body of `mailbox.closed`: the fold rejects postings and leases until the mailbox is opened again."""


class MailboxOpening(_MailboxRequest):
    """Body of `mailbox.opened`: a closed mailbox accepts postings and leases again."""


class MessageAck(_LeaseEnd):
    """Body of `message.acked`: the reader that leased the message has finished with it.

    `request_id` is that of the lease. `answers` are messages that the reader sends as a result. They are in the
    same record so that they are sent if and only if the ack is accepted.
    """

    answers: Annotated[list[Message], Field(max_length=ANSWERS_MOST)] | None = None


class MessageNack(_LeaseEnd):
    """Body of `message.nacked`: the reader that leased the message gives it back, to be handed out again.

    `request_id` is that of the lease. A message is dead after three attempts. With `is_no_attempt`, this lease
    does not count as one.
    """

    reason: Note = ""
    is_no_attempt: bool | None = None


class MessageReclaim(_LeaseEnd):
    """Body of `message.reclaimed`: the lease by the request `request_id` expired, and the message is unread."""


class MessageReading(_MessageBody):
    """Body of `message.read`: a client that looked at the message without a lease marks it as read."""


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
    """Return the record `message.claimed`, ready to append, which hands out messages of a mailbox for good.

    The messages need no ack.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        request_id: the id of the request. A repeated request has the same id.
        limit: the largest number of messages to hand out, 1 to 1,000.
        origin: `door`, which appends the record, and `principal`, which gets the messages.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
    said = {"request_id": request_id, "limit": limit}
    return _record(MESSAGE_CLAIMED, realm, recipient, said, origin)


def claim_of_record(
    realm: str, recipient: str, request_id: str, message_ids: Sequence[str], **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record `message.claimed`, ready to append, for the messages `message_ids` of one mailbox.

    A door uses it to record messages that it has already handed out.

    Args:
        realm: the realm of the mailbox.
        recipient: the agent of the mailbox.
        request_id: the id of the request. A repeated request has the same id.
        message_ids: 1 to 1,000 ids. The fold ignores messages that are not pending.
        origin: `door`, which appends the record, and `principal`, which got the messages.

    Raises:
        pydantic.ValidationError: an argument is invalid.
    """
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
        is_no_attempt: whether this lease does not count as an attempt. A message is dead after three. `None`
            means no.
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
    mailbox = f"{realm}/{recipient}"
    request = (mailbox, said.get("message_id", ""), said.get("request_id", ""))
    return body.record(record_type, stream_key(MAILBOX, mailbox), *request, ce_id=ce_id, **origin)
