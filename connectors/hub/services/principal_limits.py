"""The limits of principals and of their mailboxes, as operators have set them (LM-01, LM-02, LM-04).

**Reads** the rows of `registry_limits`. **Owns** the rates of this gateway: each gateway counts for itself, so
a principal may send twice as much at two of them. The fold of the mailbox counts what waits in it, so that
limit holds whatever the number of gateways. Jobs and subscriptions are counted in the live view, and in the
requests of this gateway that are not settled. Requests at several gateways at one moment may exceed the limit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from connectors.hub.fairness.name_facts import NameFacts
from connectors.hub.lists.row_index import RowIndex
from connectors.hub.live.live_view import LiveView
from connectors.hub.reactor.related_names import TopicsBySubscriber
from connectors.hub.services.mailboxes import MailboxIndex
from connectors.hub.serving.answers import RETRY_AFTER_S, too_many
from connectors.plumbing.network.rates import TokenBuckets
from schemas.effects.recipients import Limits, has_mailbox, limits_of
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.message import DEFAULT_REALM, MessageRow
from trunkline_agent.wire.verdicts import LIMIT_REACHED, MAILBOX_FULL, RATE_LIMITED

# The number of mailboxes that were full just now, and of principals with a rate.
_MOST: Final = 10_000
_UNDER_WAY_MOST: Final = 1000
# After so many seconds a client may ask again whether a job or a subscription has ended.
_AGAIN_S: Final = 10


class LiveJobs(RowIndex[JobRow]):
    """The ids of the live jobs of each principal. Thread-safe. The memory is that of live jobs."""

    def __init__(self) -> None:
        super().__init__(JobRow)
        self._jobs: dict[str, set[str]] = {}

    def count(self, principal: str) -> int:
        """Return the number of jobs without an end that a principal has registered, through any door."""
        with self._lock:
            return len(self._jobs.get(principal, ()))

    def _add(self, row: JobRow) -> None:
        # A job's registrar never changes. It is stored as `<door>/<principal>`.
        principal = row.registered_by.partition("/")[2]
        if row.is_live:
            self._jobs.setdefault(principal, set()).add(row.job_id)
            return
        jobs = self._jobs.get(principal)
        if jobs is not None:
            jobs.discard(row.job_id)
            if not jobs:
                del self._jobs[principal]


class PrincipalLimits:
    """The limits of principals and their mailboxes at one gateway. Not thread-safe: for the event loop.

    Args:
        live_view: The live view.
        names: The facts of names, such as their limits.
        mailboxes: The index that knows how many messages wait in a mailbox.
        jobs: The index of the live jobs of each principal.
        topics: The index of the subscriptions of each mailbox.
        clock: Returns seconds and never goes back.
    """

    def __init__(
        self,
        live_view: LiveView,
        names: NameFacts,
        mailboxes: MailboxIndex,
        jobs: LiveJobs,
        topics: TopicsBySubscriber,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live_view = live_view
        self._names = names
        self._mailboxes = mailboxes
        self._jobs = jobs
        self._topics = topics
        self._clock = clock
        self._rates: TokenBuckets[tuple[str, str]] = TokenBuckets(1, 1, clock, _MOST)
        # The mailboxes that the fold called full, with the time until which nothing is appended for them.
        self._full_until: dict[str, float] = {}
        # The requests under way for one more job or subscription, by what and whose.
        self._under_way: Counter[tuple[str, str]] = Counter()

    def of(self, name: str) -> Limits:
        """Return the limits of the principal, participant or listener of this name."""
        return self._names.of(limits_of, name)

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

    def may_be_full(self, recipient: str) -> bool:
        """Return whether a mailbox may have no room for one more message, by what this gateway has settled."""
        limits = self.of(recipient)
        most, size = limits.pending_most, self._mailboxes.size((DEFAULT_REALM, recipient))
        return limits.bytes_most is not None or (most is not None and size >= most)

    def may_refuse(self, recipient: str, message_id: str) -> bool:
        """Return whether the fold may call a mailbox full for a message whose posting is under way.

        False if the message is in the mailbox already, or the mailbox does not exist. A mailbox that is far
        from its limit is not full: at most a thousand messages are assumed to be under way.
        """
        limits = self.of(recipient)
        most, size = limits.pending_most, self._mailboxes.size((DEFAULT_REALM, recipient))
        if limits.bytes_most is None and (most is None or size + _UNDER_WAY_MOST < most):
            return False
        is_posted = self._live_view.get(MessageRow, f"{DEFAULT_REALM}/{recipient}/{message_id}") is not None
        return not is_posted and self._names.of(has_mailbox, recipient)

    def note_full(self, recipient: str) -> None:
        """Append nothing to this mailbox for a second, because the fold called it full."""
        self._full_until.pop(recipient, None)
        self._full_until[recipient] = self._clock() + RETRY_AFTER_S
        if len(self._full_until) > _MOST:
            del self._full_until[next(iter(self._full_until))]

    @contextmanager
    def one_more_job(self, principal: str) -> Iterator[None]:
        """Count the registration of a job while the context is open. See `_one_more`."""
        with self._one_more("live jobs", principal, self._jobs.count, self.of(principal).live_jobs_most):
            yield

    @contextmanager
    def one_more_subscription(self, subscriber: str) -> Iterator[None]:
        """Count a new subscription of a mailbox while the context is open. See `_one_more`."""
        most = self.of(subscriber).subscriptions_most
        with self._one_more("subscriptions", subscriber, self._topics.count, most):
            yield

    @contextmanager
    def _one_more(self, what: str, name: str, count: Callable[[str], int], most: int | None) -> Iterator[None]:
        """Count a request until it is settled. Raise ApiError (429, `limit_reached`) if there are too many."""
        key = what, name
        if most is not None and count(name) + self._under_way[key] >= most:
            raise too_many(f"{name} has {most} {what} already, its limit", _AGAIN_S, LIMIT_REACHED)
        self._under_way[key] += 1
        try:
            yield
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]
