"""The records that follow when a webhook needs a subscription, or a name loses its mailbox (DL-24, WH-01)."""

from __future__ import annotations

from typing import Final

from schemas.effects.following import BY_REACTOR, Cause, Follows, derived_id
from schemas.effects.recipients import has_mailbox
from schemas.streams.agents.agent_registry import AGENT_REMOVED
from schemas.streams.agents.mqtt_agents import AGENT_MQTT_REMOVED
from schemas.streams.agents.participants import AGENT_STOPPED
from schemas.streams.principal.principals import PRINCIPAL_REVOKED
from schemas.streams.topic.topic_registry import (
    TOPIC_SUBSCRIBED,
    TOPIC_UNSUBSCRIBED,
    Subscription,
    SubscriptionRow,
    Unsubscription,
)
from schemas.streams.webhook.webhook_registry import WEBHOOK_REMOVED, WEBHOOK_SET, WebhookRemoved, WebhookRow
from schemas.wire.record import OutgoingRecord


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
