"""The copies of a message to a topic for its subscribers, and begin and end of subscriptions (DL-24, WH-01).

A settled publication has the names of its recipients in its row. The reactor posts a copy to each of them, and
appends `topic.delivered` when all copies have a verdict, with those that mailboxes refused. So while a copy may
be missing, the row has the status `publishing`. A reactor that starts again posts all copies again, with the
same ids, and the mailboxes recognise what they have. After `topic.delivered` nothing is derived any more.

A subscription begins when a webhook needs it, and ends when a name loses its mailbox.

The functions use only the settled record and the rows of the live view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pydantic import ValidationError

from schemas.effects.following import BY_REACTOR, Cause, Follows, GetRow, derived_id
from schemas.effects.recipients import has_mailbox, limits_of
from schemas.streams.agents.agent_registry import AGENT_REMOVED, AGENT_STOPPED
from schemas.streams.agents.mqtt_agents import AGENT_MQTT_REMOVED
from schemas.streams.mailboxes.message import DEFAULT_REALM, MESSAGE_POSTED, Message
from schemas.streams.principal.principals import PRINCIPAL_REVOKED
from schemas.streams.topic.topic_registry import (
    PUBLISHING,
    REFUSED_NAMED_MOST,
    TOPIC_DELIVERED,
    TOPIC_PUBLISHED,
    TOPIC_SUBSCRIBED,
    TOPIC_UNSUBSCRIBED,
    Publication,
    Subscription,
    SubscriptionRow,
    TopicDelivery,
    TopicMessageRow,
    Unsubscription,
)
from schemas.streams.webhook.webhooks import WEBHOOK_REMOVED, WEBHOOK_SET, WebhookRemoved, WebhookRow
from schemas.wire.record import OutgoingRecord, Record
from trunkline_agent.wire.ids import MAILBOX, TOPIC, parse_stream_key
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical_plain, decode

# The door of the copies. They are far more than all that the reactor derives otherwise, so they are apart.
TOPIC_DOOR: Final = "topic"
_PUBLISHED: Final = TOPIC_PUBLISHED.encode()


class Delivery:
    """The delivery of one published message: its copies, and the record that says that all have a verdict.

    Attributes:
        row: The row of the message.
        recipients: The names of the recipients, sorted. There is at least one.
    """

    def __init__(self, body: Publication, row: TopicMessageRow, get: GetRow) -> None:
        self.row = row
        self._get = get
        self.recipients: list[str] = row.recipients or []
        # After a week another message may have the same id.
        self._cause = f"{row.topic}/{row.message_id}/{row.published_at}"
        self._sender = body.sender
        # One validated message for all copies, because they differ in two names that are valid.
        self._content = self._copy_for_first(body)

    def copy_id(self, recipient: str) -> str:
        """Return the id of the copy for a recipient. It depends on the publication and the recipient alone."""
        return derived_id(self._cause, f"{MESSAGE_POSTED}/{recipient}")

    def copies(self) -> Iterator[OutgoingRecord]:
        """Yield the record `message.posted` of each copy, in the order of the recipients.

        They are built one after the other, because all of them may be larger than the memory. Each has the
        present limits of its mailbox, which are no part of its content.
        """
        for recipient in self.recipients:
            own = {"to": recipient, "message_id": self.copy_id(recipient)}
            most = limits_of(self._get, recipient).of_mailbox
            limits = {name: limit for name, limit in most.items() if limit is not None}
            content = {**self._content, **own, **limits}
            yield OutgoingRecord(
                stream=f"{MAILBOX}/{DEFAULT_REALM}/{recipient}",
                ce_id=own["message_id"],
                door=TOPIC_DOOR,
                principal=self._sender,
                type=MESSAGE_POSTED,
                value=canonical_plain(content),
            )

    def delivered(self, refused: Sequence[str] = ()) -> OutgoingRecord:
        """Return the record `topic.delivered`. Append it when all copies have a verdict.

        `refused` are the names of the recipients whose mailboxes refused their copies.
        """
        body = TopicDelivery(
            topic=self.row.topic,
            message_id=self.row.message_id,
            refused_count=len(refused) or None,
            refused=sorted(refused)[:REFUSED_NAMED_MOST] or None,
        )
        return body.record(ce_id=derived_id(self._cause, TOPIC_DELIVERED), **BY_REACTOR)

    def _copy_for_first(self, body: Publication) -> dict[str, Any]:
        """Return the content of the copy for the first recipient."""
        published = body.model_dump(mode="json", by_alias=True, exclude_none=True)
        expiry = published.pop("expires_in_ms", None)
        if expiry is not None:
            # The same copy may be appended twice, so its expiry must not depend on the time of its append.
            published["expires_at"] = iso_moment(self.row.published_at + expiry * 1000)
        first = self.recipients[0]
        own = {"message_id": self.copy_id(first), "to": first, "broadcast_id": self.row.message_id}
        message = Message.model_validate({**published, **own})
        content: dict[str, Any] = message.model_dump(mode="json", by_alias=True, exclude_none=True)
        return content


def recipient_of(copy: OutgoingRecord) -> str:
    """Return the name of the recipient of a copy."""
    return copy.stream.rpartition("/")[2]


def delivery_of(record: Record, get: GetRow) -> Delivery | None:
    """Return the delivery of a message to a topic that `record` has published; `None` if there is none.

    The result is `None` for any other record, for a publication that was not accepted, and for one that is
    delivered already. It depends on the accepted record alone.

    Args:
        record: A settled record of any type.
        get: The look-up of rows, such as `LiveView.get`. The rows must include the effect of `record`.
    """
    if _PUBLISHED not in record.header_values or record.value is None:
        return None
    stream = parse_stream_key(record.key)
    if stream is None or stream[0] != TOPIC:
        return None
    try:
        body = Publication.model_validate(decode(record.value)[0])
    except (ValidationError, MalformedJsonError):
        return None
    row = get(TopicMessageRow, f"{stream[1]}/{body.message_id}")
    # The offset tells the accepted record from one with the same id that was refused or a duplicate.
    if row is None or row.published_offset != record.offset or row.status != PUBLISHING:
        return None
    return Delivery(body, row, get)


def _after_the_end(cause: Cause) -> list[OutgoingRecord]:
    """Return the records that follow if the name of the stream has no mailbox any more.

    A subscription that begins later is not ended, even if the records come late. The webhook is removed,
    because another owner may have the name later.
    """
    name, get = cause.name, cause.get
    if has_mailbox(get, name):
        return []
    rows = [get(SubscriptionRow, f"{topic}/{name}") for topic in sorted(cause.related(SubscriptionRow, name))]
    found = [_end_of(row, cause.id) for row in rows if row is not None and row.is_live]
    webhook = get(WebhookRow, name)
    if webhook is not None and webhook.is_live and cause.record_type != WEBHOOK_REMOVED:
        ce_id = derived_id(cause.id, WEBHOOK_REMOVED)
        found.append(WebhookRemoved(name=name, request_id=ce_id).record(ce_id=ce_id, **BY_REACTOR))
    return found


def _end_of(row: SubscriptionRow, cause: str) -> OutgoingRecord:
    ce_id = derived_id(f"{cause}/{row.key}/{row.since}", TOPIC_UNSUBSCRIBED)
    body = Unsubscription(topic=row.topic, subscriber=row.subscriber, request_id=ce_id, since=row.since)
    return body.record(ce_id=ce_id, **BY_REACTOR)


def _subscription(cause: Cause) -> list[OutgoingRecord]:
    row = cause.get(WebhookRow, cause.name)
    if row is None or not row.is_live or row.topic is None:
        return []
    return [subscription_of(row.webhook, row.topic, cause.id)]


def subscription_of(webhook: str, topic: str, cause: str) -> OutgoingRecord:
    """Return the record that subscribes the mailbox of a webhook to a topic.

    The gateway that sets the webhook appends it before it answers, and the reactor appends the same one, if the
    gateway was killed before that. `cause` is the id of the record that sets the webhook.
    """
    ce_id = derived_id(cause, TOPIC_SUBSCRIBED)
    subscription = Subscription(topic=topic, subscriber=webhook, request_id=ce_id)
    return subscription.record(ce_id=ce_id, **BY_REACTOR)


END_OF_MAILBOX: Final = Follows(
    frozenset({AGENT_STOPPED, AGENT_REMOVED, AGENT_MQTT_REMOVED, PRINCIPAL_REVOKED, WEBHOOK_REMOVED}),
    _after_the_end,
)
"""The rule of the records that stop a participant, remove an agent or a webhook, or revoke a principal."""
WEBHOOK_FOLLOWS: Final = (END_OF_MAILBOX, Follows(frozenset({WEBHOOK_SET}), _subscription))
