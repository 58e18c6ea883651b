"""The limits of the messages that wait for a listener of the XML pump (XP-08): in all, and of one sender."""

from __future__ import annotations

from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import too_many


def check_room(hub: Hub, sender: str, recipient: str) -> None:
    """Raise ApiError (429) if one more message from `sender` would exceed the queue limits of a listener.

    `recipient` is the listener's name. There is a limit for all messages that wait for the listener, and one
    for each sender. A sender that has no waiting message is always admitted, because other senders filled the
    queue.
    """
    limits, mine = hub.settings.xml_pump, hub.listeners.waiting_of(recipient, sender)
    if mine and hub.listeners.waiting(recipient) >= limits.pending_most:
        raise too_many("too many messages wait for the listener")
    if mine >= limits.pending_per_sender:
        raise too_many("too many messages of this sender wait for the listener")
