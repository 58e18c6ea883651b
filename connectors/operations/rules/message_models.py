"""The request and answer bodies of messages (HH-06, HH-08, DL-01 to DL-07) and of topics (DL-24)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from connectors.hub.serving.models import (
    WHOLE,
    AnswerBody,
    BlobDigest,
    ListLimit,
    NamedThing,
    QueryFilter,
    RequestBody,
)
from schemas.streams.mailboxes.mailbox_bodies import CLAIM_LIMIT, LIMIT_MOST
from schemas.streams.mailboxes.message import (
    DurationSeconds,
    check_times,
    milliseconds_of,
    with_message_fields,
)
from schemas.streams.mailboxes.pending_message import LEASE_MS_MOST
from schemas.streams.principal.principals import HUB
from schemas.wire.record import JSON_CONTENT
from schemas.wire.wire_body import Note, Printable
from trunkline_agent.wire.message_fields import CONVERSATION, DESCRIPTION, MESSAGE_FIELDS, message_fields_of
from trunkline_agent.wire.strict_json import canonical

WAIT_S_MOST = 300
LEASE_S_MOST = LEASE_MS_MOST // 1000
MessageKind = Annotated[Printable, Field(max_length=128)]
"""The type of a message."""
WaitSeconds = Annotated[float, Field(ge=0, le=WAIT_S_MOST, allow_inf_nan=False)]
"""How long a request may wait, in seconds."""
LeaseSeconds = Annotated[int, Field(ge=1, le=LEASE_S_MOST), WHOLE]
"""The duration of a lease in seconds."""
MessageIds = Annotated[list[NamedThing], Field(min_length=1, max_length=LIMIT_MOST)]
"""The ids of messages in the caller's own mailbox."""


class AuditFilter(QueryFilter):
    """The number of newest entries to show."""

    limit: ListLimit | None = None
    """Largest number of entries in the answer. Without it: the setting `gateway.audit_messages`."""


class DrainFilter(QueryFilter):
    """How to take messages out of the caller's mailbox."""

    limit: Annotated[int, Field(ge=1, le=LIMIT_MOST)] = CLAIM_LIMIT
    """Largest number of messages in the answer."""
    wait: WaitSeconds = 0
    """How long to wait for the first message, in seconds."""
    lease: LeaseSeconds | None = None
    """How long the messages are leased, in seconds. Without it they are taken for good."""


class SendFilter(QueryFilter):
    """The wait for the reply to a message."""

    wait_reply: WaitSeconds = 0
    """How long to wait for the reply to the message, in seconds."""
    reply_lease: LeaseSeconds | None = None
    """How long the reply is leased, in seconds. Without it the reply is taken for good."""


class BlobAnswer(AnswerBody):
    """A blob that a message refers to."""

    digest: str
    """SHA-256 of the content, 64 hex digits."""
    bytes: int
    """Length of the content in bytes."""
    content_type: str
    """Media type of the content."""


class StoredBlobAnswer(BlobAnswer):
    """A blob that is stored."""

    keep_until: AwareDatetime
    """Time before which the blob is not removed. A message that waits keeps it longer."""


class BlobFilter(QueryFilter):
    """A check of the content that is uploaded."""

    digest: BlobDigest | None = None
    """SHA-256 that the content must have, 64 lower-case hex digits."""


@with_message_fields(DESCRIPTION)
class SentMessage(RequestBody):
    """When and how urgently a message is handed out, and the blob that it refers to."""

    blob: BlobDigest | None = None
    """Digest of a blob that was uploaded before. Null: none."""

    priority: Literal["low", "normal", "high"] = "normal"
    """Messages of a higher priority are handed out first."""
    expires_in_s: DurationSeconds | None = None
    """Time until the message expires, in seconds. Null: never."""
    deliver_after_s: DurationSeconds | None = None
    """Time until the message is in the mailbox, in seconds. Null: at once."""

    @model_validator(mode="after")
    def _times_fit(self) -> Self:
        check_times(self.deliver_after_s, self.expires_in_s)
        return self

    def in_the_log(self) -> dict[str, Any]:
        """Return these fields as arguments of `schemas.streams.mailboxes.message.Message`."""
        return {
            "priority": self.priority,
            "expires_in_ms": milliseconds_of(self.expires_in_s),
            "deliver_after_ms": milliseconds_of(self.deliver_after_s),
            **message_fields_of(self),
        }


class JsonContent:
    """A message that has any JSON as its content, and a kind that its sender chooses."""

    def content(self: Any) -> tuple[str, str, str]:
        """Return kind, text and media type, as the log has them."""
        return self.type, canonical(self.payload).decode("utf-8"), JSON_CONTENT


@with_message_fields(CONVERSATION, NamedThing)
class MessageEnvelope(SentMessage, JsonContent):
    """A message to send."""

    recipient: NamedThing = HUB
    """Name of the mailbox that gets the message."""
    type: MessageKind
    """Kind of the message, a word that the sender chooses."""
    payload: Any = Field({})
    """Content of the message: any JSON."""


@with_message_fields(MESSAGE_FIELDS, str)
class MessageAnswer(AnswerBody):
    """A message that was taken from a mailbox. A field of which the message has no value is left out."""

    id: str
    """Id of the message."""
    timestamp: AwareDatetime
    """Time at which the log stored the message."""
    sender: str
    """Mailbox of the sender, to which an answer goes."""
    recipient: str
    """Mailbox that got the message."""
    type: str
    """Kind of the message, a word that the sender chose."""
    payload: Any
    """Content of the message: any JSON."""
    topic: str | None = None
    """Topic to which the message was published."""
    blob: BlobAnswer | None = None
    """Blob that the message refers to. Fetch it from the message's own path."""
    replay_of: str | None = None
    """Id of the dead message that this one repeats."""
    attempt: int | None = None
    """How often the message was handed out, if it is leased."""
    deadline: AwareDatetime | None = None
    """End of the lease, if the message is leased."""


class DeliveredAnswer(AnswerBody):
    """A message that is stored for its recipient."""

    delivered: bool
    """True: the message is in the mailbox. False: it will be there after the time of `deliver_after_s`."""
    message_id: str
    """Id of the message."""
    reply: MessageAnswer | None = None
    """Reply, if the request waited for it."""
    lease_id: str | None = None
    """Id of the lease, if the reply is leased."""


class DrainedAnswer(AnswerBody):
    """The messages taken from the caller's mailbox."""

    messages: list[MessageAnswer]
    """Messages, most urgent first."""
    left: int
    """Number of messages that still wait."""
    lease_id: str | None = None
    """Id of the lease, if the messages are leased."""


class AckRequest(RequestBody):
    """Leased messages that the caller has finished with."""

    lease_id: NamedThing
    """Id of the messages' lease."""
    message_ids: MessageIds
    """Ids of the messages."""


class NackRequest(AckRequest):
    """Leased messages that the caller gives back."""

    reason: Note = ""
    """Reason, for the mailbox's owner and the operator."""


class ExtendRequest(AckRequest):
    """Leased messages that take longer."""

    lease: LeaseSeconds
    """Time from now to the new end of the lease, in seconds."""


class LeaseFault(AnswerBody):
    """A message that a request about a lease could not change."""

    message_id: str
    """Id of the message."""
    reason: str
    """Stable code of the fault."""
    message: str
    """Explanation of the fault."""


class LeaseEndAnswer(AnswerBody):
    """The message ids of the request, each once: those that it changed, and those that it could not change."""

    done: list[str]
    """Ids of the messages that were changed, now or by the same request before."""
    refused: list[LeaseFault]
    """Messages that could not be changed."""


class ExtendedAnswer(LeaseEndAnswer):
    """As `LeaseEndAnswer`, with the new end of the lease."""

    deadline: AwareDatetime | None
    """New end of the lease. Null: no message was changed."""


class ReadRequest(RequestBody):
    """Messages of the caller's own mailbox to mark as read."""

    message_ids: Annotated[list[NamedThing], Field(max_length=LIMIT_MOST)]
    """Ids of the messages."""


class ReadAnswer(AnswerBody):
    """The message ids of the request by their result, each once."""

    read: list[str]
    """Ids of messages that are read now, by this request or an earlier one."""
    not_marked: list[str]
    """Ids of messages that are leased through another interface, or ended meanwhile in another way."""
    unknown: list[str]
    """Ids that are not in the caller's mailbox, or of expired messages."""


class AuditEntry(AnswerBody):
    """A delivered message, or a refused request to send one."""

    at: AwareDatetime
    """Time of the delivery or refusal."""
    verdict: Literal["delivered", "rejected"]
    """Outcome of the request."""
    sender: str
    """Principal that sent the request."""
    recipient: str | None
    """Recipient of the message. Null: the request named none."""
    type: str | None
    """Kind of the message. Null: the request named none."""
    message_id: str | None
    """Id of the message. Null: it was refused."""
    reason: str | None
    """Stable code of the refusal. Null: the message was delivered."""
    why: str | None
    """Explanation of the refusal. Null: the message was delivered."""


class AuditAnswer(AnswerBody):
    """The newest entries of the audit log."""

    entries: list[AuditEntry]
    """Entries, oldest first."""
    left: int
    """Number of older entries that were asked for and do not fit into the answer."""


@with_message_fields(CONVERSATION, NamedThing)
class PublishRequest(SentMessage, JsonContent):
    """A message to all subscribers of a topic. Times count from its publication."""

    type: MessageKind
    """Kind of the message, a word that the sender chooses."""
    payload: Any = Field({})
    """Content of the message: any JSON."""


class PublishedAnswer(AnswerBody):
    """A message that is in the log. Its copies come into the mailboxes of the subscribers after this answer."""

    message_id: str
    """Id of the message. Each copy has an id of its own, and this one as its `broadcast_id`."""
    topic: str
    """Name of the topic."""
    recipients: int
    """Number of mailboxes that get the message: those that were subscribed at its position in the log."""
    full: int
    """Number of further subscribers that get none, because their mailboxes are full."""


class SubscriptionRequest(RequestBody):
    """The mailbox to subscribe, or whose subscription ends."""

    subscriber: NamedThing | None = None
    """Name of the mailbox. Only the operator may name another one than its own. Null: the caller's own."""


class SubscribedAnswer(AnswerBody):
    """The state of a subscription."""

    topic: str
    """Name of the topic."""
    subscriber: str
    """Name of the mailbox."""
    status: Literal["subscribed", "unsubscribed"]
    """State of the subscription after the request."""


class TopicAnswer(AnswerBody):
    """A topic."""

    name: str
    """Name of the topic."""
    subscribers: int
    """Number of present subscribers."""
    subscribed: bool
    """True: the caller's own mailbox is subscribed."""
    created_at: AwareDatetime
    """Time of the first subscription."""
    publications: int
    """Number of messages that were published to the topic."""
    last_message_id: str | None
    """Id of the newest message. Null: there was none."""
    last_published_at: AwareDatetime | None
    """Time of the newest message. Null: there was none."""


class NamesFilter(QueryFilter):
    """A page of a list that is sorted by name."""

    limit: ListLimit = 100
    """Largest number of items in the answer."""
    after: NamedThing | None = None
    """Last name of the previous page. Without it: the first page."""


class TopicsAnswer(AnswerBody):
    """Topics, and how many there are."""

    topics: list[TopicAnswer]
    """Topics, sorted by name."""
    total: int
    """Number of all topics."""


class SubscriptionAnswer(AnswerBody):
    """A present subscription."""

    subscriber: str
    """Name of the mailbox."""
    since: AwareDatetime
    """Time at which the subscription began."""
    subscribed_by: str
    """Principal that made the subscription, as `<door>/<principal>`."""


class TopicShownAnswer(TopicAnswer):
    """A topic with its subscriptions."""

    subscriptions: list[SubscriptionAnswer]
    """Subscriptions, sorted by the name of the mailbox."""
