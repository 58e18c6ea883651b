"""The message, the same for every door: its body in the log, its life cycle, and the record that posts it.

delayed --> unread <--> leased --> claimed | expired | cleared | dead
   |           `-----------------> claimed | read | expired | cleared
   `-----------------------------> expired | cleared

A message whose lease has expired counts as unread. A delayed message is not in the mailbox yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, Unpack

from pydantic import BaseModel, Field, create_model, model_validator

from schemas.fold.stream_kind import terminal_states
from schemas.fold.view_rows import Moment, Row
from schemas.streams.blob.blobs import BlobReference
from schemas.wire.record import Origin, OutgoingRecord
from schemas.wire.wire_body import Most, Name, Note, UtcTime, WireBody
from trunkline_agent.wire.message_fields import (
    DESCRIPTION,
    DURATION_S_LEAST,
    DURATION_S_MOST,
    EXPIRES_FIRST,
    MESSAGE_FIELDS,
    MessageField,
    expires_first,
)
from trunkline_agent.wire.strict_json import canonical_plain

MESSAGE_POSTED: Final = "message.posted"
MAILBOX_VIEW: Final = "mailbox"
MESSAGE_BODIES: Final = "message_bodies"

DEFAULT_REALM: Final = "default"
# In the order in which messages are handed out.
PRIORITIES: Final = ("high", "normal", "low")

REPAIRS_MOST: Final = 20

DELAYED: Final = "delayed"
UNREAD: Final = "unread"
LEASED: Final = "leased"
CLAIMED: Final = "claimed"  # handed out and acknowledged, at once by a claim or later by an ack
READ: Final = "read"
EXPIRED: Final = "expired"
CLEARED: Final = "cleared"
DEAD: Final = "dead"
# A message whose lease has expired counts as unread. An ack, a nack or a reclaim ends a lease.
MESSAGE_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    DELAYED: frozenset({UNREAD, EXPIRED, CLEARED}),
    UNREAD: frozenset({LEASED, CLAIMED, READ, EXPIRED, CLEARED, DEAD}),
    LEASED: frozenset({UNREAD, CLAIMED, CLEARED, DEAD}),
    CLAIMED: frozenset(),
    READ: frozenset(),
    EXPIRED: frozenset(),
    CLEARED: frozenset(),
    DEAD: frozenset(),
}
MESSAGE_FINAL: Final = terminal_states(MESSAGE_TRANSITIONS)
# The messages that are in the mailbox.
MESSAGE_PENDING: Final = frozenset(MESSAGE_TRANSITIONS) - MESSAGE_FINAL - {DELAYED}

_Model = TypeVar("_Model", bound=BaseModel)
# As `is_one_line`. Decoded text has no halves of characters.
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$"
_Moment = Annotated[str, Field(max_length=40)]
MessageKind = Annotated[str, Field(min_length=1, max_length=128)]
"""A word that the sender of a message chooses."""
ContentType = Annotated[str, Field(max_length=128)]
"""The media type of a message's body."""
Priority = Literal["low", "normal", "high"]
"""How urgently a message is handed out."""
DurationMs = Annotated[int, Field(ge=1, le=DURATION_S_MOST * 1000)]
"""A time from the posting of a message, in milliseconds: up to 366 days."""
DurationSeconds = Annotated[float, Field(ge=DURATION_S_LEAST, le=DURATION_S_MOST, allow_inf_nan=False)]
"""A time from the posting of a message, in seconds: a millisecond to 366 days."""


def check_times(deliver_after: float | None, expires_in: float | None) -> None:
    """Raise ValueError if a message would expire before it is delivered.

    Both are times from its posting, in the same unit. `None` means at once, and never.
    """
    if expires_first(deliver_after, expires_in):
        raise ValueError(EXPIRES_FIRST)


def _line_of(most: int) -> Any:
    return Annotated[str, Field(min_length=1, max_length=most, pattern=_ONE_LINE)]


def with_message_fields(
    fields: Sequence[MessageField] = MESSAGE_FIELDS, name: Any = Name
) -> Callable[[type[_Model]], type[_Model]]:
    """Return a decorator that adds optional fields of a message to a model, at its end.

    They have descriptions. `name` is the type of a name.
    """

    def add(model: type[_Model]) -> type[_Model]:
        about: dict[str, Any] = {"__base__": model, "__doc__": model.__doc__, "__module__": model.__module__}
        added: dict[str, Any] = {
            one.name: (
                (_line_of(one.most) if one.most else name) | None,
                Field(None, description=f"{one.text} Null: none."),
            )
            for one in fields
        }
        found: type[_Model] = create_model(model.__name__, **about, **added)
        return found

    return add


class MessageRow(Row, frozen=True, gc=False):
    """A row of `mailbox`: the status of one message for one recipient. Its body is in `message_bodies`.

    Conversations between listeners form a tree (XP-07): a listener that asks another begins a conversation
    below its own.
    """

    VIEW: ClassVar = MAILBOX_VIEW
    KEY: ClassVar = ("realm", "recipient", "message_id")
    ORDER: ClassVar = "ended_at"

    realm: str
    """Namespace of the mailbox."""
    recipient: str
    """Recipient within the realm."""
    message_id: str
    """Id of the message."""
    status: str
    """State of the message, such as `unread`, `leased` or `read`."""
    sender: str
    """Name of the sender."""
    from_verified: bool
    """True if the door authenticated the sender."""
    from_task: str | None
    """Task whose token the sender used. Null: none."""
    kind: str
    """Kind of the message, a word that the sender chooses."""
    priority: str
    """`low`, `normal` or `high`."""
    in_reply_to: str | None
    """Id of the message that this one answers. Null: none."""
    thread: str | None
    """Recipient's id of the conversation that the message belongs to. Null: none."""
    broadcast_id: str | None
    """Id that all copies of a broadcast, or of a message to a topic, share. Null: neither."""
    sent_at: str | None
    """Time of sending by the sender's clock, as the sender wrote it."""
    expires_at: str | None
    """Time at which the message expires: as the sender wrote it, or by the log's clock. Null: never."""
    posted_at: Moment
    """Time at which Kafka appended the message, or at which a delayed message became unread."""
    attempts: int = 0
    """How often the message was handed out."""
    handed_to: str | None = None
    """Last reader, as `<door>/<principal>`. Null: the message was not handed out."""
    handed_at: Moment | None = None
    """Time at which the last reader got the message."""
    request_id: str | None = None
    """Id of the request by which the last reader got the message."""
    lease_until: Moment | None = None
    """End of the lease. Null if the message is not leased."""
    ended_at: Moment | None = None
    """Time at which the message reached its final status. Null: it is pending."""
    parent_thread: str | None = None
    """Id of the conversation above this one in the tree: the one in which the caller asked."""
    root_thread: str | None = None
    """Id of the conversation at the root of the tree."""
    on_behalf_of: str | None = None
    """Principal on whose behalf the conversation at the root began."""
    last_reason: str | None = None
    """Reason why the newest attempt failed, as its reader gave it. Null: no reason was given."""
    replay_of: str | None = None
    """Id of the dead message that this one repeats. Null: none."""
    deliver_at: Moment | None = None
    """Time before which the message is not delivered. Null: it was not delayed."""
    topic: str | None = None
    """Topic to which the message was published. Null: none."""
    blob: str | None = None
    """Digest of the blob that the message refers to. Null: none."""
    hops: int | None = None
    """Number of messages in the chain between listeners that led to this one. Null: see the conversations."""
    subject: str | None = None
    """Short text about the message, for lists. Null: none."""

    @property
    def is_live(self) -> bool:
        """True if the message is delayed, unread or leased."""
        return self.ended_at is None

    @property
    def lists(self) -> tuple[str, ...]:
        """The list of the row's status."""
        return (self.status,)


class MessageBodyRow(Row, frozen=True, gc=False):
    """A row of `message_bodies`: the body of a message.

    The row is written once. Later records about the message change only its row in `mailbox`.
    """

    VIEW: ClassVar = MESSAGE_BODIES
    KEY: ClassVar = ("realm", "recipient", "message_id")

    realm: str
    """Namespace of the mailbox."""
    recipient: str
    """Recipient within the realm."""
    message_id: str
    """Id of the message."""
    body: str
    """Body of the message."""
    content_type: str
    """Media type of the body."""
    blob_bytes: int | None = None
    """Length of the blob that the message refers to, in bytes. Null: it refers to none."""
    blob_type: str | None = None
    """Media type of that blob. Null: the message refers to none."""

    @property
    def is_live(self) -> bool:
        """False: the gateway does not keep the body in memory."""
        return False


@with_message_fields(DESCRIPTION)
class Message(WireBody):
    """Body of `message.posted`: one message for one recipient. `message_id` alone identifies it.

    Attributes:
        from_verified: whether the door authenticated the sender.
        from_task: the task whose token the sender used, or `None`.
        thread: the recipient's id of the conversation. `parent_thread`, `root_thread` and `on_behalf_of` are
            its place in the tree, which recipients do not see.
        sent_at: the sender's time, as the sender wrote it.
        expires_at: the time at which the message expires, ISO 8601 in UTC. `None` means never.
        expires_in_ms: the time from the append of the record to the message's expiry, instead of `expires_at`.
        deliver_after_ms: the time from the append of the record to the message's delivery (DL-22). Until then
            its status is `delayed`. It must be shorter than `expires_in_ms`.
        replay_of: the id of the dead message that this one repeats, or `None`.
        opens_thread: `True` if the message opens the conversation `thread`, whose row it then makes. The mark
            is no part of the content: the same message with and without it is one message.
        pending_most: the number of messages without a final status that the mailbox may have with this one. The
            door fills it in, and it is no part of the content. `None` means no limit. A limit of the mailbox's
            own (`mailbox.limited`) counts instead.
        bytes_most: the same for the bytes of their bodies and blobs.
        unlimited: `True` for a message of Trunkline itself or of a listener, which a full mailbox takes, too.
            It is no part of the content, either.
        hops: the number of messages in the chain between listeners that led to this one, if a listener of the
            chain addressed an answer to its asker by name. `None`: the tree of conversations has the number.
        repairs: descriptions of the repairs that the door made to the message. Only the ledger stores them.
        original: the message before the repairs in base64. Only the ledger stores it.
        topic: the topic to which the message was published, or `None`. `broadcast_id` is then its id there.
        blob: the reference to a large content that is stored outside the log (DL-25), or `None`. Its bytes
            count like those of the body.
    """

    TYPE: ClassVar = MESSAGE_POSTED
    STREAM: ClassVar = "mailbox/{realm}/{recipient}"

    message_id: Name
    realm: Name = DEFAULT_REALM
    sender: Annotated[Name, Field(alias="from")]
    from_verified: bool = False
    from_task: Name | None = None
    recipient: Annotated[Name, Field(alias="to")]
    kind: MessageKind
    priority: Priority = "normal"
    body: str
    content_type: ContentType = "application/json"
    in_reply_to: Name | None = None
    thread: Name | None = None
    sent_at: _Moment | None = None
    expires_at: UtcTime | None = None
    expires_in_ms: DurationMs | None = None
    deliver_after_ms: DurationMs | None = None
    broadcast_id: Name | None = None
    parent_thread: Name | None = None
    root_thread: Name | None = None
    on_behalf_of: Name | None = None
    replay_of: Name | None = None
    opens_thread: Literal[True] | None = None
    pending_most: Most | None = None
    bytes_most: Most | None = None
    unlimited: Literal[True] | None = None
    hops: Annotated[int, Field(ge=1)] | None = None
    repairs: Annotated[list[Note], Field(max_length=REPAIRS_MOST)] | None = None
    original: str | None = None
    topic: Name | None = None
    blob: BlobReference | None = None

    @property
    def content_bytes(self) -> int:
        """The length of the body in UTF-8, with that of the blob."""
        return len(self.body.encode()) + (0 if self.blob is None else self.blob.bytes)

    @model_validator(mode="after")
    def _times_fit(self) -> Message:
        if self.expires_in_ms is not None and self.expires_at is not None:
            raise ValueError("has both expires_at and expires_in_ms")
        check_times(self.deliver_after_ms, self.expires_in_ms)
        return self

    def value(self, limits: Mapping[str, int | None] | None = None) -> bytes:
        """Return the message as canonical JSON without null fields, which becomes the value of the record.

        `limits` are values of `pending_most` and `bytes_most` in the place of its own. `None`: its own.
        """
        fields = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for name, most in (limits or {}).items():
            fields.pop(name, None)
            if most is not None:
                fields[name] = most
        return canonical_plain(fields)

    def record(
        self,
        *,
        ce_id: str | None = None,
        cause: str = "",
        limits: Mapping[str, int | None] | None = None,
        **origin: Unpack[Origin],
    ) -> OutgoingRecord:
        """Return the record that posts the message to its mailbox. Its `ce_id` is the message's id.

        The fold rejects another message with this id as `seq_conflict`. `limits` are as in `value`.
        """
        stream, value = self.STREAM.format_map(vars(self)), self.value(limits)
        return OutgoingRecord(stream, ce_id or self.message_id, type=MESSAGE_POSTED, value=value, **origin)


def milliseconds_of(seconds: float | None) -> int | None:
    """Return seconds as whole milliseconds, at least one; `None` for `None`."""
    return None if seconds is None else max(1, round(seconds * 1000))


def verified_message(
    message_id: str, sender: str, recipient: str, kind: str, body: str, content_type: str, **fields: Any
) -> Message:
    """Return a message, ready to post, whose sender the door has authenticated.

    Args:
        message_id: the id of the new message. A message that is posted again has the same id.
        sender: the name of the sender.
        recipient: the name of the recipient, without its realm.
        kind: the kind of the message, a word that the sender chooses.
        body: the text of the message, of the media type `content_type`.
        content_type: the media type of `body`, such as `application/json`.
        fields: further fields of `Message` by their names, such as `priority`. Without `realm`, the realm is
            `default`.

    Raises:
        pydantic.ValidationError: a value is invalid, or there is no such field.
    """
    named = {"message_id": message_id, "from": sender, "from_verified": True, "to": recipient}
    return Message.model_validate({**named, "kind": kind, "body": body, "content_type": content_type, **fields})
