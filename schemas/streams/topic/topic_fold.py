"""The fold of the stream `topic/<name>`: subscriptions, and messages for all subscribers (DL-24).

Entries:
`topic`: the numbers of the topic, and the newest requests to subscribe and unsubscribe.
`requests/<2 hex digits>`: older requests (`schemas.fold.memories`).
`s/<subscriber>`: one present subscription. The order of the keys is that of the recipients.
`p/<message_id>`: one message that is being published, without its content and its recipients.
`id/<4 hex digits>`: the ids with this prefix of their SHA-256 that were published in the last week, at most
64. So a topic forgets an id earlier only if some four million others came meanwhile.

A record reads and writes few entries, however many subscribers there are. Only a publication reads the keys of
all subscriptions.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.memories import RequestChunk, RequestMemory, content_digest
from schemas.fold.settled import Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.fold.view_rows import row_maker
from schemas.streams.topic.topic_registry import (
    DELIVERED,
    PUBLISHING,
    SUBSCRIBED,
    SUBSCRIBERS_MOST,
    SUBSCRIPTION_TRANSITIONS,
    TOPIC_DELIVERED,
    TOPIC_MESSAGE_TRANSITIONS,
    TOPIC_MODELS,
    TOPIC_PUBLISHED,
    TOPIC_SUBSCRIBED,
    UNDELIVERED_MOST,
    UNSUBSCRIBED,
    SubscriptionRow,
    TopicMessageRow,
    TopicRow,
)
from trunkline_agent.wire.ids import TOPIC
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
ID_KEPT_US: Final = 7 * 24 * 3600 * 1_000_000
# A publication writes all ids of an entry.
IDS_TOGETHER: Final = 64
_ID_DIGITS: Final = 4
SUBSCRIPTION_PREFIX: Final = "s/"


class TopicEntry(msgspec.Struct, array_like=True, gc=False):
    """The numbers of a topic as in its row, and a memory of accepted requests to subscribe and unsubscribe.

    Times are in microseconds since 1970 UTC.
    """

    version: int
    created_by: str
    created_at: int
    requests: RequestMemory
    subscribers: int = 0
    publications: int = 0
    undelivered: int = 0
    last_message_id: str | None = None
    last_published_at: int | None = None


class SubscriptionEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A present subscription. `since` is in microseconds since 1970 UTC."""

    version: int
    since: int
    subscribed_by: str


class PublicationEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message that is being published: the fields of its row that outlast its delivery, and its digest."""

    version: int
    digest: bytes
    sender: str
    kind: str
    recipient_count: int
    published_at: int
    published_offset: int
    blob: str | None = None


class KnownIds(msgspec.Struct, array_like=True, gc=False):
    """Ids of published messages, oldest first: each with the digest of the content and the time in µs."""

    version: int
    ids: dict[str, tuple[bytes, int]]


_TOPIC: Final = StructEntries("topic", TopicEntry)
_REQUESTS: Final = StructEntries("requests/", RequestChunk)
_SUBSCRIPTIONS: Final = StructEntries(SUBSCRIPTION_PREFIX, SubscriptionEntry)
_PUBLICATIONS: Final = StructEntries("p/", PublicationEntry)
_IDS: Final = StructEntries("id/", KnownIds)
_topic_row: Final = row_maker(TopicRow, TopicEntry)
_message_row: Final = row_maker(TopicMessageRow, PublicationEntry)


def settle_topic(given: FoldInput) -> Outcome:
    """Settle a record of `topic/<name>`: update the stream state, return verdict and changed rows.

    The record begins or ends a subscription, publishes a message, or reports that a message is delivered. The
    topic exists from its first subscription on, also when all subscribers have left.
    `schemas.streams.fold.settle` calls this function with a checked body. The changes of the stream state,
    `given.entries`, count only if the record is accepted.
    """
    topic = _TOPIC.read(given.entries)
    if topic is None:
        if given.type != TOPIC_SUBSCRIBED:
            return rejected(UNKNOWN_STREAM, "no topic with this name")
        topic = TopicEntry(ENTRY_VERSION, given.sender, given.now_us, RequestMemory())
    if given.type == TOPIC_PUBLISHED:
        return _settle_publication(given, topic)
    if given.type == TOPIC_DELIVERED:
        return _settle_delivery(given, topic)
    return _settle_subscription(given, topic)


def subscribers_of(entries: Entries) -> list[str]:
    """Return the names of a topic's present subscribers, sorted. `entries` is the state of its stream."""
    begin = len(SUBSCRIPTION_PREFIX)
    return [key[begin:] for key in entries.with_prefix(SUBSCRIPTION_PREFIX)]


def _settle_subscription(given: FoldInput, topic: TopicEntry) -> Outcome:
    """Begin or end a subscription. If the subscriber's status does not change, the record is a duplicate."""
    name = given.body["subscriber"]
    known = _SUBSCRIPTIONS.read(given.entries, name)
    status = UNSUBSCRIBED if known is None else SUBSCRIBED
    wanted = SUBSCRIBED if given.type == TOPIC_SUBSCRIBED else UNSUBSCRIBED
    repeated = topic.requests.repeated(given, _REQUESTS, status)
    if repeated is not None:
        return repeated
    if wanted not in SUBSCRIPTION_TRANSITIONS[status]:
        return duplicate(status)
    if known is None:
        if topic.subscribers >= SUBSCRIBERS_MOST:
            return rejected(ILLEGAL_TRANSITION, f"the topic has {SUBSCRIBERS_MOST} subscribers already")
        began, until, by = SubscriptionEntry(ENTRY_VERSION, given.now_us, given.sender), None, None
        _SUBSCRIPTIONS.write(given.entries, began, name)
        topic.subscribers += 1
    else:
        if given.body.get("since") not in (None, known.since):
            return duplicate(status)
        began, until, by = known, given.now_us, given.sender
        _SUBSCRIPTIONS.delete(given.entries, name)
        topic.subscribers -= 1
    topic.requests.add(given, _REQUESTS)
    row = SubscriptionRow(
        topic=given.name,
        subscriber=name,
        status=wanted,
        since=began.since,
        subscribed_by=began.subscribed_by,
        until=until,
        unsubscribed_by=by,
    )
    return _accepted(given, topic, wanted, row)


def _settle_publication(given: FoldInput, topic: TopicEntry) -> Outcome:
    """Note a new message, for all that are subscribed now."""
    message_id, digest = given.body["message_id"], content_digest(given.body)
    pending = _PUBLICATIONS.read(given.entries, message_id)
    at = _place_of_id(message_id)
    known = _IDS.read(given.entries, at) or KnownIds(ENTRY_VERSION, {})
    first = given.now_us - ID_KEPT_US
    kept = {one: about for one, about in known.ids.items() if about[1] >= first}
    earlier = kept[message_id][0] if message_id in kept else None if pending is None else pending.digest
    if earlier is not None:
        status = DELIVERED if pending is None else PUBLISHING
        if earlier == digest:
            return duplicate(status)
        return rejected(SEQ_CONFLICT, "this message id was published with other content", status)
    recipients = subscribers_of(given.entries)
    if topic.undelivered + len(recipients) > UNDELIVERED_MOST:
        return rejected(ILLEGAL_TRANSITION, "too many messages of the topic are not delivered yet")
    kept[message_id] = (digest, given.now_us)
    if len(kept) > IDS_TOGETHER:
        del kept[next(iter(kept))]
    known.ids = kept
    _IDS.write(given.entries, known, at)
    entry = PublicationEntry(
        version=ENTRY_VERSION,
        digest=digest,
        sender=given.body["from"],
        kind=given.body["kind"],
        recipient_count=len(recipients),
        published_at=given.now_us,
        published_offset=given.record.offset,
        blob=(given.body.get("blob") or {}).get("digest"),
    )
    topic.publications += 1
    topic.undelivered += len(recipients)
    topic.last_message_id, topic.last_published_at = message_id, given.now_us
    if not recipients:
        return _accepted(given, topic, DELIVERED, _delivered(given, entry))
    _PUBLICATIONS.write(given.entries, entry, message_id)
    row = _message_row(
        entry,
        topic=given.name,
        message_id=message_id,
        status=PUBLISHING,
        recipients=recipients,
        delivered_at=None,
    )
    return _accepted(given, topic, PUBLISHING, row)


def _settle_delivery(given: FoldInput, topic: TopicEntry) -> Outcome:
    """Note that the mailboxes of all recipients have taken or refused a message."""
    message_id = given.body["message_id"]
    pending = _PUBLICATIONS.read(given.entries, message_id)
    if pending is None:
        known = _IDS.read(given.entries, _place_of_id(message_id))
        if known is None or message_id not in known.ids:
            return rejected(UNKNOWN_STREAM, "no message with this id was published lately")
    status = DELIVERED if pending is None else PUBLISHING
    if pending is None or DELIVERED not in TOPIC_MESSAGE_TRANSITIONS[status]:
        return duplicate(status)
    _PUBLICATIONS.delete(given.entries, message_id)
    topic.undelivered -= pending.recipient_count
    return _accepted(given, topic, DELIVERED, _delivered(given, pending))


def _delivered(given: FoldInput, entry: PublicationEntry) -> TopicMessageRow:
    return _message_row(
        entry,
        topic=given.name,
        message_id=given.body["message_id"],
        status=DELIVERED,
        recipients=None,
        delivered_at=given.now_us,
        refused_count=given.body.get("refused_count", 0),
        refused=given.body.get("refused"),
    )


def _accepted(
    given: FoldInput, topic: TopicEntry, status: str, row: SubscriptionRow | TopicMessageRow
) -> Outcome:
    _TOPIC.write(given.entries, topic)
    return accepted(status, (changed(_topic_row(topic, topic=given.name)), changed(row)))


def _place_of_id(message_id: str) -> str:
    return hashlib.sha256(message_id.encode("ascii")).hexdigest()[:_ID_DIGITS]


TOPIC_KIND: Final = StreamKind(
    name=TOPIC,
    models=TOPIC_MODELS,
    settle=settle_topic,
    row_of_each_stream=(TopicRow,),
    rows=(TopicRow, SubscriptionRow, TopicMessageRow),
    named_by="topic",
)
