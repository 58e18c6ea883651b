"""Random records about topics: subscriptions, messages and reports of their delivery, for the random log."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from schemas.streams.topic.topic_registry import (
    Publication,
    Subscription,
    TopicDelivery,
    Unsubscription,
)
from schemas.wire.record import OutgoingRecord


def topic_record(draw: random.Random, subscribers: Sequence[str]) -> OutgoingRecord:
    """One record about one of few topics."""
    roll, topic = draw.random(), f"topic-{draw.randrange(3)}"
    by: Any = {"door": draw.choice(["http", "mcp"]), "principal": draw.choice(subscribers[:2])}
    request, message_id = f"request-{draw.randrange(30)}", f"published-{draw.randrange(15)}"
    if roll < 0.35:
        body = Subscription(topic=topic, subscriber=draw.choice(subscribers), request_id=request)
        return body.record(**by)
    if roll < 0.5:
        since = draw.choice([None, None, 1])
        end = Unsubscription(topic=topic, subscriber=draw.choice(subscribers), request_id=request, since=since)
        return end.record(**by)
    if roll < 0.75:
        content = draw.choice([{}, {}, {"priority": "high"}, {"expires_in_ms": 500}, {"thread": "thread-1"}])
        named = {"topic": topic, "message_id": message_id, "from": by["principal"], "kind": "note"}
        return Publication.model_validate({**named, "body": "☃", **content}).record(**by)
    return TopicDelivery(topic=topic, message_id=message_id).record(
        ce_id=f"d-{message_id}", door="reactor", principal="reactor"
    )
