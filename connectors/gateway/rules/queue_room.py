"""The limits of the messages that wait for a listener of the XML pump (XP-08): in all, and of one sender."""

from __future__ import annotations

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import too_many


def check_room(hub: Hub, sender: str, recipient: str) -> None:
    """Raise ApiError (429) if a further message of this sender would exceed the listener's queue limits.

    `recipient` is the listener. A sender without a waiting message may always send one, because other senders
    filled the queue.
    """
    limits, mine = hub.settings.xml_pump, hub.listeners.waiting_of(recipient, sender)
    if mine and hub.listeners.waiting(recipient) >= limits.pending_most:
        raise too_many("too many messages wait for the listener")
    if mine >= limits.pending_per_sender:
        raise too_many("too many messages of this sender wait for the listener")
