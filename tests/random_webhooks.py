"""Random records of webhooks, for the random log: requests that set, pause, resume and remove few of them."""

from __future__ import annotations

import random

from schemas.keys.sealing import Keyring, webhook_secret_purpose
from schemas.streams.webhook import webhook_registry as webhooks
from schemas.wire.record import OutgoingRecord


def webhook_record(draw: random.Random, keyring: Keyring) -> OutgoingRecord:
    """Return one record about one of few webhooks. Their addresses exist nowhere."""
    roll, name, request_id = draw.random(), f"hook-{draw.randrange(6)}", f"request-{draw.randrange(300)}"
    by = {"door": "http", "principal": draw.choice(["ann", "operator"])}
    if roll < 0.5:
        url = draw.choice(["https://hooks.invalid/a", "https://hooks.invalid:8443/b?c=1"])
        topic, overlap_ms = draw.choice([None, None, "news"]), draw.choice([0, 0, 60_000])
        return webhooks.WebhookSet(
            sealed_secret=keyring.seal(f"whsec_{draw.getrandbits(40)}".encode(), webhook_secret_purpose(name)),
            name=name,
            url=url,
            topic=topic,
            overlap_ms=overlap_ms,
            request_id=request_id,
        ).record(**by)
    if roll < 0.7:
        revision = draw.choice([None, 1, 2])
        paused = webhooks.WebhookPaused(name=name, request_id=request_id, revision=revision, reason="broken")
        return paused.record(**by)
    model = webhooks.WebhookResumed if roll < 0.85 else webhooks.WebhookRemoved
    return model(name=name, request_id=request_id).record(**by)
