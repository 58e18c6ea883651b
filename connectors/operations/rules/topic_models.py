"""The request and answer bodies of topics (DL-24)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AwareDatetime, Field

from connectors.hub.serving.models import AnswerBody, ListLimit, NamedThing, QueryFilter, RequestBody
from connectors.operations.rules.message_models import JsonContent, MessageKind, SentMessage
from schemas.streams.mailboxes.message import with_message_fields
from trunkline_agent.wire.message_fields import CONVERSATION


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
