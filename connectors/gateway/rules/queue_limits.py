"""Limits of the messages that wait for a listener, and of the messages that one sender posts (XP-08)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import too_many

_MINUTE_S: Final = 60.0
_SENDERS: Final = 10_000


def check_room(hub: Hub, sender: str, recipient: str) -> None:
    """Raise ApiError (429) when too many messages wait for a listener.

    A sender without a waiting message may always post one, because other senders filled the queue.
    """
    limits, mine = hub.settings.xml_pump, hub.listeners.waiting_of(recipient, sender)
    if mine and hub.listeners.waiting(recipient) >= limits.pending_most:
        raise too_many("too many messages wait for the listener")
    if mine >= limits.pending_per_sender:
        raise too_many("too many messages of this sender wait for the listener")


class SenderRates:
    """A token bucket for each sender. `per_minute`: the rate and the burst size; None for no limit."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and their time

    def take(self, sender: str) -> float | None:
        """Count one message. Returns the seconds to wait when the rate is exceeded, else None."""
        if self._per_minute is None:
            return None
        now, a_second = self._clock(), self._per_minute / _MINUTE_S
        tokens, at = self._buckets.pop(sender, (float(self._per_minute), now))
        tokens = min(float(self._per_minute), tokens + (now - at) * a_second)
        is_one_too_many = tokens < 1
        self._buckets[sender] = (tokens if is_one_too_many else tokens - 1, now)
        if len(self._buckets) > _SENDERS:
            self._buckets.popitem(last=False)
        return (1 - tokens) / a_second if is_one_too_many else None
