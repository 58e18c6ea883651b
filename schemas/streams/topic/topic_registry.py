"""The records about topics (DL-24): their bodies and rows.

A topic is a list of subscribers. A message that is published to it goes to each subscriber's mailbox.

subscribed <--> unsubscribed          publishing --> delivered
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from schemas.fold.stream_kind import Transitions
from schemas.fold.view_rows import Moment, Row
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.mailboxes.message import (
    ContentType,
    DurationMs,
    MessageKind,
    check_times,
    with_message_fields,
)
from schemas.wire.wire_body import Name, WireBody, models_of

TOPIC_SUBSCRIBED: Final = "topic.subscribed"
TOPIC_UNSUBSCRIBED: Final = "topic.unsubscribed"
TOPIC_PUBLISHED: Final = "topic.published"
TOPIC_DELIVERED: Final = "topic.delivered"
REGISTRY_TOPICS: Final = "registry_topics"
REGISTRY_SUBSCRIPTIONS: Final = "registry_subscriptions"
TOPIC_MESSAGES: Final = "topic_messages"

SUBSCRIBERS_MOST: Final = 10_000
"""The largest number of subscribers of a topic."""
REFUSED_NAMED_MOST: Final = 100
"""The largest number of names in the list of the recipients whose mailboxes refused a message."""
UNDELIVERED_MOST: Final = 1_000_000
"""The largest number of postings of a topic that the reactor has not reported as delivered yet."""

SUBSCRIBED: Final = "subscribed"
UNSUBSCRIBED: Final = "unsubscribed"
SUBSCRIPTION_TRANSITIONS: Final[Transitions] = {
    SUBSCRIBED: frozenset({UNSUBSCRIBED}),
    UNSUBSCRIBED: frozenset({SUBSCRIBED}),
}
PUBLISHING: Final = "publishing"
DELIVERED: Final = "delivered"
TOPIC_MESSAGE_TRANSITIONS: Final[Transitions] = {
    PUBLISHING: frozenset({DELIVERED}),
    DELIVERED: frozenset(),
}


class TopicRow(Row, frozen=True, gc=False):
    """A row of `registry_topics`: a topic, from its first subscription on."""

    VIEW: ClassVar = REGISTRY_TOPICS
    KEY: ClassVar = ("topic",)

    topic: str
    """Name of the topic."""
    subscribers: int
    """Number of present subscribers."""
    created_by: str
    """Principal that made the first subscription, as `<door>/<principal>`."""
    created_at: Moment
    """Time of the first subscription."""
    publications: int
    """Number of messages that were published to the topic."""
    undelivered: int
    """Number of mailboxes to which messages in the status `publishing` go."""
    last_message_id: str | None
    """Id of the newest published message. Null: there was none."""
    last_published_at: Moment | None
    """Time at which the newest message was published. Null: there was none."""


class SubscriptionRow(Row, frozen=True, gc=False):
    """A row of `registry_subscriptions`: the present or last subscription of one subscriber to one topic."""

    VIEW: ClassVar = REGISTRY_SUBSCRIPTIONS
    KEY: ClassVar = ("topic", "subscriber")

    topic: str
    """Name of the topic."""
    subscriber: str
    """Name of the subscriber's mailbox in the realm `default`."""
    status: str
    """`subscribed` or `unsubscribed`."""
    since: Moment
    """Time at which the subscription began."""
    subscribed_by: str
    """Principal that made the subscription, as `<door>/<principal>`."""
    until: Moment | None
    """Time at which the subscription ended. Null: it has not ended."""
    unsubscribed_by: str | None
    """Principal that ended the subscription, as `<door>/<principal>`. Null: it has not ended."""

    @property
    def is_live(self) -> bool:
        """True if the subscription has not ended."""
        return self.status == SUBSCRIBED


class TopicMessageRow(Row, frozen=True, gc=False):
    """A row of `topic_messages`: a message that was published to a topic. The view `mailbox` has its copies."""

    VIEW: ClassVar = TOPIC_MESSAGES
    KEY: ClassVar = ("topic", "message_id")

    topic: str
    """Name of the topic."""
    message_id: str
    """Id of the message. Its copies have it as `broadcast_id`."""
    status: str
    """`publishing`, or `delivered` when each mailbox has taken or refused its copy."""
    sender: str
    """Name of the sender."""
    kind: str
    """Kind of the message, a word that the sender chooses."""
    recipient_count: int
    """Number of subscribers when the message was published."""
    recipients: list[str] | None
    """Names of these subscribers, sorted. Null: the message is delivered."""
    published_at: Moment
    """Time at which Kafka appended the message."""
    published_offset: int
    """Kafka offset of the record. The recipients are those who were subscribed at this offset."""
    delivered_at: Moment | None
    """Time at which each mailbox had taken or refused its copy. Null: the message is being published."""
    blob: str | None = None
    """Digest of the blob that the message refers to. Null: none."""
    refused_count: int = 0
    """Number of recipients whose mailboxes refused their copies, such as full ones."""
    refused: list[str] | None = None
    """Names of these recipients, sorted, at most 100. Null: none."""

    @property
    def is_live(self) -> bool:
        """True if the message is being published."""
        return self.status == PUBLISHING


class _TopicBody(WireBody):
    STREAM: ClassVar = "topic/{topic}"
    OMITS_NULLS: ClassVar[bool] = True

    topic: Name


class Subscription(_TopicBody):
    """Body of `topic.subscribed`: the mailbox of `subscriber` gets what is published from now on."""

    TYPE: ClassVar = TOPIC_SUBSCRIBED
    IDENTITY: ClassVar = ("{origin}", "{topic}", "{request_id}")

    subscriber: Name
    request_id: Name


class Unsubscription(_TopicBody):
    """Body of `topic.unsubscribed`: the mailbox of `subscriber` gets nothing that is published from now on.

    Attributes:
        since: only the subscription that began at this time ends, in microseconds since 1970 UTC. A later one
            stays. `None` means whichever there is.
    """

    TYPE: ClassVar = TOPIC_UNSUBSCRIBED
    IDENTITY: ClassVar = ("{origin}", "{topic}", "{request_id}")

    subscriber: Name
    request_id: Name
    since: Annotated[int, Field(ge=0)] | None = None


@with_message_fields()
class Publication(_TopicBody):
    """Body of `topic.published`: one message for all present subscribers. `message_id` identifies it.

    The other fields are those of `schemas.streams.mailboxes.message.Message`. `expires_in_ms` counts from the
    append of this record, and `deliver_after_ms` from the append of each copy.
    """

    TYPE: ClassVar = TOPIC_PUBLISHED

    message_id: Name
    sender: Annotated[Name, Field(alias="from")]
    from_verified: bool = False
    from_task: Name | None = None
    kind: MessageKind
    priority: Literal["low", "normal", "high"] = "normal"
    body: str
    content_type: ContentType = "application/json"
    expires_in_ms: DurationMs | None = None
    deliver_after_ms: DurationMs | None = None
    blob: BlobReference | None = None

    def derived_id(self, content: bytes, known: Mapping[str, Any]) -> str:
        """Return the id of the message. The fold rejects another one with it as `seq_conflict`."""
        return self.message_id

    @model_validator(mode="after")
    def _times_fit(self) -> Publication:
        check_times(self.deliver_after_ms, self.expires_in_ms)
        return self


class TopicDelivery(_TopicBody):
    """Body of `topic.delivered`: each recipient's mailbox has taken or refused its copy of a message.

    Attributes:
        message_id: the id of the message.
        refused_count: the number of mailboxes that refused their copies. `None` means 0.
        refused: the names of these recipients, sorted, at most 100.
    """

    TYPE: ClassVar = TOPIC_DELIVERED

    message_id: Name
    refused_count: Annotated[int, Field(ge=1, le=SUBSCRIBERS_MOST)] | None = None
    refused: Annotated[list[Name], Field(max_length=REFUSED_NAMED_MOST)] | None = None


TOPIC_MODELS: Final = models_of(Subscription, Unsubscription, Publication, TopicDelivery)
