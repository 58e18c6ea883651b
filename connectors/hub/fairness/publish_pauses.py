"""Decides when an account at the MQTT broker is paused, because it publishes far beyond its rate (LM-10).

The broker has no rate limit for a client, and acknowledges a message before the bridge reads it. So a client
that ignores the refusals in its receipts costs the whole machine. The bridge reports what each account has
published. This module counts what exceeds the account's rate, and says for how long the account is paused.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from connectors.plumbing.network.rates import TokenBuckets

# An account is paused when more messages than these, and than this part of its rate, exceed its rate within
# `WINDOW_S` seconds.
EXCESS_LEAST: Final = 100
EXCESS_PART: Final = 0.1
WINDOW_S: Final = 10.0
# The first pause, and the longest one. Each pause is twice as long as the one before.
FIRST_S: Final = 60
LONGEST_S: Final = 960
# After so long without a pause, the next pause is as long as the first one.
FORGOTTEN_S: Final = 3600.0
_MOST: Final = 10_000
_T = TypeVar("_T")


@dataclass
class _Excess:
    """The messages beyond the rate of an account since the time `since`."""

    since: float
    messages: float = 0.0


@dataclass
class _Pause:
    """The last pause of an account."""

    seconds: int
    until: float


class PublishPauses:
    """The pauses of the accounts at the MQTT broker. Not thread-safe: for the event loop.

    It remembers the 10,000 accounts that were used last, by their owners.

    Args:
        clock: Returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: TokenBuckets[str] = TokenBuckets(1, 1, clock, _MOST)
        self._excess: OrderedDict[str, _Excess] = OrderedDict()
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def report(self, owner: str, messages: int, per_minute: int | None) -> int | None:
        """Count messages that an account has published. Return the seconds for which to pause it, or None.

        While an account is paused, its messages cause no other pause: the broker may have taken them before.

        Args:
            owner: The owner of the account: a job or an agent.
            messages: The number of messages since the last report.
            per_minute: The number of messages that the account may publish in a minute. None: any number.
        """
        if per_minute is None:
            return None
        excess = self._rates.take_part(owner, messages, per_minute)
        now, last = self._clock(), self._pauses.get(owner)
        if not excess or (last is not None and now < last.until):
            return None
        found = self._excess.pop(owner, None)
        if found is None or now - found.since > WINDOW_S:
            found = _Excess(now)
        found.messages += excess
        if found.messages <= max(EXCESS_LEAST, EXCESS_PART * per_minute):
            _put(self._excess, owner, found)
            return None
        seconds = FIRST_S
        if last is not None and now - last.until < FORGOTTEN_S:
            seconds = min(2 * last.seconds, LONGEST_S)
        self._pauses.pop(owner, None)
        _put(self._pauses, owner, _Pause(seconds, now + seconds))
        return seconds


def _put(known: OrderedDict[str, _T], owner: str, value: _T) -> None:
    known[owner] = value
    if len(known) > _MOST:
        known.popitem(last=False)
