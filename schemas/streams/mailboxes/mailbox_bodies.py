"""The bodies of the records about claims, leases, acks and other steps of a message; limits of mailboxes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.fold.view_rows import Moment, Row
from schemas.streams.control.organism import PER_MINUTE_MOST
from schemas.streams.mailboxes.message import DEFAULT_REALM, Message
from schemas.streams.mailboxes.pending_message import LEASE_MS_MOST
from schemas.wire.wire_body import Most, Name, Note, WireBody, models_of
from trunkline_agent.wire.ids import content_id

MESSAGE_CLAIMED: Final = "message.claimed"
MESSAGE_LEASED: Final = "message.leased"
MESSAGE_ACKED: Final = "message.acked"
MESSAGES_HANDLED: Final = "message.handled"
MESSAGE_NACKED: Final = "message.nacked"
MESSAGE_EXTENDED: Final = "message.extended"
MESSAGE_RECLAIMED: Final = "message.reclaimed"
MESSAGE_READ: Final = "message.read"
MESSAGE_DUE: Final = "message.due"
MESSAGE_EXPIRED: Final = "message.expired"
MAILBOX_CLEARED: Final = "mailbox.cleared"
MAILBOX_CLOSED: Final = "mailbox.closed"
MAILBOX_OPENED: Final = "mailbox.opened"
MAILBOX_LIMITED: Final = "mailbox.limited"

CLAIM_LIMIT: Final = 100
LEASE_LIMIT: Final = 1
LIMIT_MOST: Final = 1000
LEASE_MS: Final = 30_000
ANSWERS_MOST: Final = 100
HANDLED_MOST: Final = 100
ATTEMPTS_LIMIT: Final = 1000

_Limit = Annotated[int, Field(ge=1, le=LIMIT_MOST)]
_LeaseMs = Annotated[int, Field(ge=1, le=LEASE_MS_MOST)]


class _MailboxBody(WireBody):
    STREAM: ClassVar = "mailbox/{realm}/{recipient}"
    OMITS_NULLS: ClassVar = True

    realm: Name = DEFAULT_REALM
    recipient: Name = Field(alias="to")


class _MailboxRequest(_MailboxBody):
    IDENTITY: ClassVar = ("{origin}", "{realm}/{recipient}", "", "{request_id}")

    request_id: Name


class _MessageBody(_MailboxBody):
    IDENTITY: ClassVar = ("{origin}", "{realm}/{recipient}", "{message_id}", "")

    message_id: Name


class _LeaseEnd(_MessageBody):
    IDENTITY: ClassVar = ("{origin}", "{realm}/{recipient}", "{message_id}", "{request_id}")

    request_id: Name


class MailboxClaim(_MailboxRequest):
    """Body of `message.claimed`: hand out up to `limit` messages for good. They need no ack.

    With `message_ids`, only these messages are claimed, if they are pending. A door that has already handed out
    messages records the fact in this way. With `if_unread`, they are claimed only if nobody holds them.

    With `bytes_most`, the bodies of the messages have together at most so many bytes in UTF-8. The first
    message is handed out even if it is larger.
    """

    TYPE: ClassVar = MESSAGE_CLAIMED

    limit: _Limit = CLAIM_LIMIT
    message_ids: Annotated[list[Name], Field(min_length=1, max_length=LIMIT_MOST)] | None = None
    if_unread: bool | None = None
    bytes_most: Most | None = None


class MailboxLease(_MailboxRequest):
    """Body of `message.leased`: hand out up to `limit` messages, which must be acknowledged within `lease_ms`.

    `held_most` and `per_minute` count the messages of all readers of the mailbox together.

    Attributes:
        message_ids: the only messages that may be handed out. `None` means all.
        held_most: the largest number of messages that may be leased at once. `None` means no limit.
        per_minute: the largest number of messages that leases with this field may hand out in 60 s of the log's
            time. `None` means no limit.
        from_closed: whether to lease even if the mailbox is closed, to return its messages to their senders.
        attempts_most: how often each message may be handed out before it is dead. `None` means three times.
        bytes_most: the largest number of bytes of their bodies, as in `MailboxClaim`. `None` means no limit.
    """

    TYPE: ClassVar = MESSAGE_LEASED

    limit: _Limit = LEASE_LIMIT
    lease_ms: _LeaseMs = LEASE_MS
    message_ids: Annotated[list[Name], Field(min_length=1, max_length=LIMIT_MOST)] | None = None
    held_most: _Limit | None = None
    per_minute: Annotated[int, Field(ge=1, le=PER_MINUTE_MOST)] | None = None
    from_closed: bool | None = None
    attempts_most: Annotated[int, Field(ge=1, le=ATTEMPTS_LIMIT)] | None = None
    bytes_most: Most | None = None


class MailboxClearing(_MailboxRequest):
    """Body of `mailbox.cleared`: all pending messages of the mailbox end with the status `cleared`."""

    TYPE: ClassVar = MAILBOX_CLEARED


class MailboxClosing(_MailboxRequest):
    """Body of `mailbox.closed`: the fold rejects postings and leases until the mailbox is opened again."""

    TYPE: ClassVar = MAILBOX_CLOSED


class MailboxOpening(_MailboxRequest):
    """Body of `mailbox.opened`: a closed mailbox accepts postings and leases again."""

    TYPE: ClassVar = MAILBOX_OPENED


class MailboxLimits(_MailboxRequest):
    """Body of `mailbox.limited`: the mailbox's own limits, instead of those that a posting carries.

    `pending_most` and `bytes_most` have the meaning that they have in `message.posted`. `None` means that the
    mailbox has no such limit of its own any more.
    """

    TYPE: ClassVar = MAILBOX_LIMITED

    pending_most: Most | None = None
    bytes_most: Most | None = None


class MessageAck(_LeaseEnd):
    """Body of `message.acked`: the reader that leased the message has finished with it.

    `request_id` is that of the lease. `answers` are messages that the reader sends as a result. They are in the
    same record so that they are sent if and only if the ack is accepted.
    """

    TYPE: ClassVar = MESSAGE_ACKED

    answers: Annotated[list[Message], Field(max_length=ANSWERS_MOST)] | None = None


class HandledMessage(BaseModel):
    """One message in the body of `message.handled`, with the fields that an ack has."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    message_id: Name
    request_id: Name
    answers: Annotated[list[Message], Field(max_length=ANSWERS_MOST)] | None = None


def _unlike(messages: list[HandledMessage]) -> list[HandledMessage]:
    if len({one.message_id for one in messages}) != len(messages):
        raise ValueError("holds a message twice")
    return messages


class MessagesHandled(_MailboxBody):
    """Body of `message.handled`: a reader has finished with several messages that it leased.

    It does for all of them what an ack does for one, or nothing: the fold rejects the record if it would reject
    the ack of one of them.
    """

    TYPE: ClassVar = MESSAGES_HANDLED

    messages: Annotated[
        list[HandledMessage], Field(min_length=1, max_length=HANDLED_MOST), AfterValidator(_unlike)
    ]

    def derived_id(self, content: bytes, known: Mapping[str, Any]) -> str:
        """Return the CloudEvents id, which depends on the ids of the messages and of their leases alone."""
        ids = (f"{one.message_id}/{one.request_id}" for one in self.messages)
        parts = (self.TYPE, known["origin"], f"{self.realm}/{self.recipient}", *ids)
        return content_id(*(part.encode() for part in parts))


class MessageNack(_LeaseEnd):
    """Body of `message.nacked`: the reader that leased the message gives it back, to be handed out again.

    `request_id` is that of the lease. A message is dead after the attempts that the lease allows, by default
    three. With `is_no_attempt`, this lease does not count as one.
    """

    TYPE: ClassVar = MESSAGE_NACKED

    reason: Note = ""
    is_no_attempt: bool | None = None


class MessageExtension(_LeaseEnd):
    """Body of `message.extended`: the lease of the message now ends `lease_ms` after this record.

    `request_id` is that of the lease.
    """

    TYPE: ClassVar = MESSAGE_EXTENDED

    lease_ms: _LeaseMs


class MessageReclaim(_LeaseEnd):
    """Body of `message.reclaimed`: the lease by the request `request_id` expired, and the message is unread."""

    TYPE: ClassVar = MESSAGE_RECLAIMED


class MessageReading(_MessageBody):
    """Body of `message.read`: a client that looked at the message without a lease marks it as read."""

    TYPE: ClassVar = MESSAGE_READ


class MessageDue(_MessageBody):
    """Body of `message.due`: the time `deliver_at` of a delayed message has come, and the message is unread."""

    TYPE: ClassVar = MESSAGE_DUE


class MessageExpiry(_MessageBody):
    """Body of `message.expired`: the time `expires_at` of the message has passed."""

    TYPE: ClassVar = MESSAGE_EXPIRED


MAILBOX_MODELS: Final = models_of(
    Message,
    MailboxClaim,
    MailboxLease,
    MessageAck,
    MessagesHandled,
    MessageNack,
    MessageExtension,
    MessageReclaim,
    MessageReading,
    MessageDue,
    MessageExpiry,
    MailboxClearing,
    MailboxClosing,
    MailboxOpening,
    MailboxLimits,
)


MAILBOX_LIMITS: Final = "mailbox_limits"
# The limit of a mailbox for which no other was set.
PENDING_DEFAULT: Final = 100_000


class MailboxLimitRow(Row, frozen=True, gc=False):
    """A row of `mailbox_limits`: the limits that were set for one mailbox."""

    VIEW: ClassVar = MAILBOX_LIMITS
    KEY: ClassVar = ("realm", "recipient")

    realm: str
    """Namespace of the mailbox."""
    recipient: str
    """Recipient within the realm."""
    pending_most: int | None
    """Largest number of messages without a final status. Null: no limit of its own."""
    bytes_most: int | None
    """Largest number of bytes of the bodies and blobs of these messages. Null: no limit of its own."""
    limited_by: str
    """Principal that set the limits, as `<door>/<principal>`."""
    limited_at: Moment
    """Time at which the limits were set."""


class OwnLimits(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The limits of a mailbox's own, as its state stores them. `None`: the limit that a posting carries."""

    version: int
    pending_most: int | None = None
    bytes_most: int | None = None


class MailboxSize(msgspec.Struct, array_like=True, gc=False):
    """The number of messages of a mailbox without a final status, and the bytes of their bodies and blobs.

    Messages from before fold version 11 count, and their bytes do not.
    """

    version: int
    messages: int = 0
    body_bytes: int = 0
