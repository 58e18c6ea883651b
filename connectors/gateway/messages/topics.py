"""Publishing to topics, changing subscriptions and listing topics, for HTTP routes and MCP tools (DL-24)."""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import Any, Final, Unpack

import msgspec

from connectors.gateway.rules.hub_policy import is_known_recipient, tokens_at_us
from connectors.gateway.rules.message_limits import check_rate, subscription_counted
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import ApiError, not_found, refuse_rejected, too_many
from connectors.gateway.web.idempotency import Origin, request_uuid
from connectors.live.settled_feed import SettledRecord
from schemas.streams.topic.topic_fold import subscribers_of
from schemas.streams.topic.topic_registry import (
    SUBSCRIBED,
    UNDELIVERED_MOST,
    UNSUBSCRIBED,
    Publication,
    Subscription,
    SubscriptionRow,
    TopicMessageRow,
    TopicRow,
    Unsubscription,
    publication_record,
    subscription_record,
)
from trunkline_agent.wire.ids import TOPIC, stream_key
from trunkline_agent.wire.verdicts import UNKNOWN_RECIPIENT

# Subscribers whose mailboxes are looked at before the answer. The row of the message counts all of them.
_CHECKED_MOST: Final = 1000
_LOOK_S: Final = 0.02


class Published(msgspec.Struct, frozen=True):
    """A message that was published: its record with the verdict.

    Attributes:
        settled: The record.
        recipients: The number of mailboxes that the message goes to.
        full: The number of further subscribers whose mailboxes are full, so that they do not get it.
    """

    settled: SettledRecord
    recipients: int
    full: int


def message_id_of(requester: str, topic: str, key: str | None) -> str:
    """Return the id of a message that a request publishes to `topic`. An idempotency key counts for one topic.

    For the other arguments see `request_uuid`.
    """
    return str(request_uuid(requester, None if key is None else f"topic/{topic}/{key}"))


async def publish(hub: Hub, body: Publication, route: str, **origin: Unpack[Origin]) -> Published:
    """Publish a message, and wait until its record is settled. The reactor then posts the copies.

    It counts once among the messages that its sender may send in a minute. `route` is the name of the route or
    tool, for the record of a refusal.

    Raises:
        ApiError: 404 for an unknown topic, 409 for a message id that was used for another message, and 429 if
            too many messages of the topic are not delivered yet, or the sender has sent too many.
        BackboneUnreachable: Kafka is unreachable, or the record was not settled in time.
    """
    topic = hub.live_view.get(TopicRow, body.topic)
    key = f"{body.topic}/{body.message_id}"
    is_full = topic is not None and topic.undelivered + topic.subscribers > UNDELIVERED_MOST
    if hub.live_view.get(TopicMessageRow, key) is None:
        if is_full:
            raise too_many("too many messages of the topic are not delivered yet")
        check_rate(hub, body.sender, len(body.body.encode()), 1, route)
    settled = refuse_rejected(await hub.appender.settle(publication_record(body, **origin)))
    row = hub.live_view.get(TopicMessageRow, key)
    if row is None:
        return Published(settled, 0, 0)
    if row.recipients is not None and any(
        hub.limits.may_be_full(name) for name in row.recipients[:_CHECKED_MOST]
    ):
        row = await _delivered(hub, row)
    return Published(settled, row.recipient_count - row.refused_count, row.refused_count)


async def _delivered(hub: Hub, row: TopicMessageRow) -> TopicMessageRow:
    """Wait until each mailbox has taken or refused its copy, for a short time, and return the row."""
    deadline = time.monotonic() + hub.settings.gateway.settle_timeout_s
    while row.is_live and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
        row = hub.live_view.get(TopicMessageRow, row.key) or row
    return row


async def subscribe(
    hub: Hub, topic: str, subscriber: str, request_id: str, route: str, **origin: Unpack[Origin]
) -> SettledRecord:
    """Subscribe a mailbox to a topic, and wait until the record is settled. It may be a duplicate.

    Args:
        hub: The hub.
        topic: The name of the topic, which need not exist.
        subscriber: The name of the mailbox.
        request_id: The id of the request.
        route: The name of the route or tool, for the record of a refusal.
        origin: The door and the caller.

    Raises:
        ApiError: 404 if there is no mailbox of this name, and 429 (`limit_reached`) if it has as many
            subscriptions as it may have. 409 if the topic has the largest number of subscribers, or for a
            request id that was used for another subscriber.
        BackboneUnreachable: Kafka is unreachable, or the record was not settled in time.
    """
    if not is_known_recipient(hub.live_view, subscriber, tokens_at_us=tokens_at_us(hub)):
        why = "no mailbox of this name is known"
        hub.refusals.record(UNKNOWN_RECIPIENT, why, origin["principal"], route)
        raise ApiError(404, UNKNOWN_RECIPIENT, why)
    body = Subscription(topic=topic, subscriber=subscriber, request_id=request_id)
    if status_of(hub, topic, subscriber) == UNSUBSCRIBED:
        with subscription_counted(hub, subscriber, origin["principal"], route):
            return refuse_rejected(await hub.appender.settle(subscription_record(body, **origin)))
    return refuse_rejected(await hub.appender.settle(subscription_record(body, **origin)))


async def unsubscribe(
    hub: Hub, topic: str, subscriber: str, request_id: str, **origin: Unpack[Origin]
) -> SettledRecord:
    """End a subscription, and wait until the record is settled. Without a subscription it is a duplicate.

    For the arguments see `subscribe`. Raises ApiError (404) for an unknown topic, and as `subscribe` does.
    """
    body = Unsubscription(topic=topic, subscriber=subscriber, request_id=request_id)
    return refuse_rejected(await hub.appender.settle(subscription_record(body, **origin)))


def status_of(hub: Hub, topic: str, subscriber: str) -> str:
    """Return whether a mailbox is subscribed to a topic now: `subscribed` or `unsubscribed`."""
    row = hub.live_view.get(SubscriptionRow, f"{topic}/{subscriber}")
    return SUBSCRIBED if row is not None and row.is_live else UNSUBSCRIBED


def topics_page(hub: Hub, limit: int, after: str | None) -> tuple[list[TopicRow], int]:
    """Return up to `limit` topics after the name `after`, sorted by name, and the number of all topics."""
    rows = hub.live_view.live(TopicRow)
    later = (row for row in rows if after is None or row.topic > after)
    return heapq.nsmallest(limit, later, key=lambda row: row.topic), len(rows)


def subscriptions_page(hub: Hub, topic: str, limit: int, after: str | None) -> list[SubscriptionRow]:
    """Return up to `limit` present subscriptions of a topic after the name `after`, sorted by name.

    Raises ApiError (404) for an unknown topic.
    """
    if hub.live_view.get(TopicRow, topic) is None:
        raise not_found("no topic with this name")
    names = subscribers_of(hub.live_view.entries(stream_key(TOPIC, topic)))
    later = [name for name in names if after is None or name > after][:limit]
    rows: list[Any] = [hub.live_view.get(SubscriptionRow, f"{topic}/{name}") for name in later]
    return [row for row in rows if row is not None]
