"""Derived records of webhooks: the subscription to a topic, and the removal with the mailbox (WH-01).

They follow from the settled record and the row of the webhook. So they are the same at every gateway.
"""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

from connectors.hub.reactor.derived_records import BY_REACTOR, derived_id
from connectors.hub.reactor.known_recipients import GetRow, has_mailbox
from schemas.streams.agents.agent_registry import AGENT_REMOVED
from schemas.streams.agents.mqtt_agents import AGENT_MQTT_REMOVED
from schemas.streams.agents.participants import AGENT_STOPPED
from schemas.streams.principal.principals import PRINCIPAL_REVOKED
from schemas.streams.topic.topic_registry import TOPIC_SUBSCRIBED, Subscription
from schemas.streams.webhook.webhook_registry import (
    WEBHOOK_REMOVED,
    WEBHOOK_SET,
    WebhookRemoved,
    WebhookRow,
)
from schemas.wire.record import BadEnvelopeError, OutgoingRecord, Record, read_envelope
from trunkline_agent.wire.ids import AGENT, PRINCIPAL, WEBHOOK, parse_stream_key

# These end the mailbox of the name of their stream, unless the name has one for another reason.
ENDS_OF_MAILBOX: Final = frozenset({AGENT_STOPPED, AGENT_REMOVED, AGENT_MQTT_REMOVED, PRINCIPAL_REVOKED})


def webhook_records(record: Record, get: GetRow) -> list[OutgoingRecord]:
    """Return the records that follow from a change of a webhook, or from the end of its mailbox, in a list.

    When a webhook of a topic is set, its mailbox is subscribed to the topic. When the mailbox of a webhook has
    ended, the webhook is removed, because another owner may have the name later.

    Args:
        record: A settled record of any type.
        get: The look-up of rows, such as `LiveView.get`. The rows must include the effect of `record`.
    """
    stream = parse_stream_key(record.key)
    if stream is None or stream[0] not in (AGENT, PRINCIPAL, WEBHOOK):
        return []
    row = get(WebhookRow, stream[1])
    if row is None or not row.is_live:
        return []
    try:
        envelope = read_envelope(record)
        if envelope.type == WEBHOOK_SET and row.topic is not None:
            return [subscription_of(row.webhook, row.topic, envelope.ce_id)]
        if envelope.type in ENDS_OF_MAILBOX and not has_mailbox(get, row.webhook):
            ce_id = derived_id(envelope.ce_id, WEBHOOK_REMOVED)
            removal = WebhookRemoved(name=row.webhook, request_id=ce_id)
            return [removal.record(ce_id=ce_id, **BY_REACTOR)]
    except (BadEnvelopeError, ValidationError):
        pass
    return []


def subscription_of(webhook: str, topic: str, cause: str) -> OutgoingRecord:
    """Return the record that subscribes the mailbox of a webhook to a topic.

    The gateway that sets the webhook appends it before it answers, and the reactor appends the same one, if the
    gateway was killed before that. `cause` is the id of the record that sets the webhook.
    """
    ce_id = derived_id(cause, TOPIC_SUBSCRIBED)
    subscription = Subscription(topic=topic, subscriber=webhook, request_id=ce_id)
    return subscription.record(ce_id=ce_id, **BY_REACTOR)
