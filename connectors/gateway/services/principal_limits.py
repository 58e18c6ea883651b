"""The limits of principals and of their mailboxes, as operators have set them (LM-01, LM-02).

**Reads** the rows of `registry_limits`. **Owns** the rates of this gateway: each gateway counts for itself, so
a principal may send twice as much at two of them. The fold of the mailbox counts what waits in it, so that
limit holds whatever the number of gateways.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from connectors.gateway.services.mailboxes import MailboxIndex
from connectors.gateway.web.answers import RETRY_AFTER_S, too_many
from connectors.live.live_view import LiveView
from connectors.rates.token_buckets import TokenBuckets
from connectors.reactor.limits_of_principals import Limits, limits_of
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.wire.verdicts import MAILBOX_FULL, RATE_LIMITED

# The number of mailboxes that were full just now, and of principals with a rate.
_MOST: Final = 10_000


class PrincipalLimits:
    """The limits of principals and their mailboxes at one gateway. Not thread-safe: for the event loop.

    Args:
        live_view: The live view, with the rows of the limits.
        mailboxes: The index that knows how many messages wait in a mailbox.
        clock: Returns seconds and never goes back.
    """

    def __init__(
        self, live_view: LiveView, mailboxes: MailboxIndex, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._live_view = live_view
        self._mailboxes = mailboxes
        self._clock = clock
        self._rates: TokenBuckets[tuple[str, str]] = TokenBuckets(1, 1, clock, _MOST)
        # The mailboxes that the fold called full, with the time until which nothing is appended for them.
        self._full_until: dict[str, float] = {}

    def of(self, name: str) -> Limits:
        """Return the limits of the principal, participant or listener of this name."""
        return limits_of(self._live_view.get, name)

    def check_rate(self, principal: str, body_bytes: int, messages: int = 1) -> None:
        """Count messages that a principal sends now. Raise ApiError (429, `rate_limited`) if they are too many.

        `body_bytes` is the length of all their bodies together in UTF-8.
        """
        limits = self.of(principal)
        for what, count, per_minute in (
            ("messages", messages, limits.messages_per_minute),
            ("bytes in messages", body_bytes, limits.bytes_per_minute),
        ):
            if per_minute is None:
                continue
            wait_s = self._rates.take((principal, what), count, per_minute)
            if wait_s:
                raise too_many(f"{principal} may send {per_minute} {what} a minute here", wait_s, RATE_LIMITED)

    def check_room(self, recipient: str) -> Limits:
        """Return the limits of a mailbox. Raise ApiError (429, `mailbox_full`) if it is full for certain.

        A mailbox counts as full for a second after the fold called it so. The fold decides all other cases.
        """
        limits = self.of(recipient)
        most, size = limits.pending_most, self._mailboxes.size((DEFAULT_REALM, recipient))
        if most is not None and size >= most:
            raise too_many(f"{size} messages wait in the mailbox, and its limit is {most}", reason=MAILBOX_FULL)
        until = self._full_until.get(recipient)
        if until is not None and until > self._clock():
            raise too_many("the mailbox is full", reason=MAILBOX_FULL)
        return limits

    def note_full(self, recipient: str) -> None:
        """Append nothing to this mailbox for a second, because the fold called it full."""
        self._full_until.pop(recipient, None)
        self._full_until[recipient] = self._clock() + RETRY_AFTER_S
        if len(self._full_until) > _MOST:
            del self._full_until[next(iter(self._full_until))]
