"""Publishing to topics, changing subscriptions and listing topics, for the doors (DL-24)."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Unpack

import msgspec

from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError, not_found, too_many
from connectors.hub.serving.identities import Origin, request_uuid
from connectors.operations.rules.hub_policy import (
    check_rate,
    is_known_recipient,
    subscription_counted,
    tokens_at_us,
)
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
)
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.ids import TOPIC, stream_key
from trunkline_agent.wire.verdicts import UNKNOWN_RECIPIENT

# Subscribers whose mailboxes are looked at before the answer. The row of the message counts all of them.
_CHECKED_MOST: Final = 1000
_LOOK_S: Final = 0.02


class Published(msgspec.Struct, frozen=True):
    """The numbers of a message that was published.

    Attributes:
        recipients: The number of mailboxes that the message goes to.
        full: The number of further subscribers whose mailboxes are full, so that they do not get it.
    """

    recipients: int
    full: int


def message_id_of(requester: str, topic: str, key: str | None) -> str:
    """Return the id of a message that a request publishes to `topic`. An idempotency key counts for one topic.

    For the other arguments see `request_uuid`.
    """
    return str(request_uuid(requester, None if key is None else f"topic/{topic}/{key}"))


def publication(hub: Hub, body: Publication, route: str, **origin: Unpack[Origin]) -> OutgoingRecord:
    """Return the record of a message. The reactor posts the copies when it is settled.

    The message counts once among those that its sender may send in a minute. `route` is the name of the route
    or tool, for the record of a refusal.

    Raises ApiError (429) if too many messages of the topic are not delivered yet, or the sender has sent too
    many. The log refuses an unknown topic, and an id that was used for another message.
    """
    topic = hub.live_view.get(TopicRow, body.topic)
    if hub.live_view.get(TopicMessageRow, _key_of(body)) is None:
        if topic is not None and topic.undelivered + topic.subscribers > UNDELIVERED_MOST:
            raise too_many("too many messages of the topic are not delivered yet")
        check_rate(hub, body.sender, len(body.body.encode()), 1, route)
    return body.record(**origin)


def published_at_once(hub: Hub, body: Publication) -> Published | None:
    """Return the numbers of a settled message. None: a mailbox may be full, so they are not certain yet."""
    row = hub.live_view.get(TopicMessageRow, _key_of(body))
    if row is None:
        return Published(0, 0)
    recipients = (row.recipients or ())[:_CHECKED_MOST]
    return None if any(map(hub.limits.may_be_full, recipients)) else _numbers(row)


async def published(hub: Hub, body: Publication) -> Published:
    """Return the numbers of a settled message.

    If a mailbox may be full, wait until each has taken or refused its copy, for a short time.
    """
    found, deadline = published_at_once(hub, body), time.monotonic() + hub.settings.gateway.settle_timeout_s
    while found is None:
        row = hub.live_view.get(TopicMessageRow, _key_of(body))
        if row is None or not row.is_live or time.monotonic() >= deadline:
            return Published(0, 0) if row is None else _numbers(row)
        await asyncio.sleep(_LOOK_S)
    return found


def _key_of(body: Publication) -> str:
    return f"{body.topic}/{body.message_id}"


def _numbers(row: TopicMessageRow) -> Published:
    return Published(row.recipient_count - row.refused_count, row.refused_count)


@contextmanager
def subscription(
    hub: Hub, body: Subscription, route: str, **origin: Unpack[Origin]
) -> Iterator[OutgoingRecord]:
    """Give the record of a subscription, which counts among those of the mailbox while the context is open.

    `route` is the name of the route or tool, for the record of a refusal.

    Raises ApiError: 404 if there is no such mailbox, and 429 (`limit_reached`) if it has as many subscriptions
    as it may have. The log refuses one too many of the topic, and a request id that was used for another one.
    """
    if not is_known_recipient(hub.live_view, body.subscriber, tokens_at_us=tokens_at_us(hub)):
        why = "no mailbox of this name is known"
        hub.refusals.record(UNKNOWN_RECIPIENT, why, origin["principal"], route)
        raise ApiError(404, UNKNOWN_RECIPIENT, why)
    with ExitStack() as counted:
        if status_of(hub, body.topic, body.subscriber) == UNSUBSCRIBED:
            counted.enter_context(subscription_counted(hub, body.subscriber, origin["principal"], route))
        yield body.record(**origin)


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
