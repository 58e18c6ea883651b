"""How much may wait for a listener (XP-08): in all, and of one sender, whichever HTTP route it comes by."""

from __future__ import annotations

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import BUSY, RETRY_AFTER_S, ApiError


def check_room(hub: Hub, sender: str, recipient: str) -> None:
    """Raise ApiError (429) when too much waits for a listener. Who has nothing waiting may always send one: a
    queue that others have filled is not this sender's fault.
    """
    limits, mine = hub.settings.xml_pump, hub.listeners.waiting_of(recipient, sender)
    if mine and hub.listeners.waiting(recipient) >= limits.pending_most:
        raise too_many("too many messages wait for the listener")
    if mine >= limits.pending_per_sender:
        raise too_many("too many messages of this sender wait for the listener")


def too_many(why: str, wait_s: float = RETRY_AFTER_S) -> ApiError:
    """429, with the time after which to come again."""
    return ApiError(429, BUSY, why, {"Retry-After": str(max(1, round(wait_s)))})
