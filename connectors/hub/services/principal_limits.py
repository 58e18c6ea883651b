"""The limits of principals and of their mailboxes, as operators have set them (LM-01, LM-02, LM-04).

**Reads** the rows of `registry_limits`. **Owns** the rates of this gateway: each gateway counts for itself, so
a principal may send twice as much at two of them. The fold of the mailbox counts what waits in it, so that
limit holds whatever the number of gateways. Jobs and subscriptions are counted in the live view, and in the
requests of this gateway that are not settled. Requests at several gateways at one moment may exceed the limit.

An account at the MQTT broker is paused if it publishes far beyond its rate (LM-10). The broker has no rate
limit for a client, and acknowledges a message before the bridge reads it. So a client that ignores the refusals
in its receipts costs the whole machine. The bridge reports what each account has published.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowIndex
from connectors.hub.reactor.derived_records import TopicsBySubscriber
from connectors.hub.services.mailboxes import MailboxIndex
from connectors.hub.serving.answers import RETRY_AFTER_S, too_many
from connectors.plumbing.network.rates import TokenBuckets
from schemas.effects.following import GetRow
from schemas.effects.recipients import Limits, has_mailbox, limits_of
from schemas.fold.settled import AppliedChange
from schemas.streams.agents.agent_registry import AgentRow, ParticipantRow
from schemas.streams.agents.mqtt_agents import MqttAgentRow
from schemas.streams.control.limits import LimitRow
from schemas.streams.control.organism import ListenerRow
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.message import DEFAULT_REALM, MessageRow
from schemas.streams.principal.principals import PrincipalRow
from schemas.streams.webhook.webhooks import WebhookRow
from trunkline_agent.wire.verdicts import LIMIT_REACHED, MAILBOX_FULL, RATE_LIMITED

_T = TypeVar("_T")

_ROWS: Final = (AgentRow, LimitRow, ListenerRow, MqttAgentRow, ParticipantRow, PrincipalRow, WebhookRow)
_VIEWS: Final = frozenset(row.VIEW for row in _ROWS)
_FACTS: Final = 50_000
_UNKNOWN: Final = object()


class NameFacts:
    """Facts of names that depend on rows of principals, participants, agents, listeners, webhooks and limits.

    Thread-safe.

    Args:
        get: The look-up of rows, such as `LiveView.get`.
    """

    follows = _ROWS

    def __init__(self, get: GetRow) -> None:
        self._get = get
        self._known: dict[tuple[Any, str], Any] = {}
        self._lock = threading.Lock()
        self._changes = 0

    def changed(self, change: AppliedChange) -> None:
        """Forget all facts if a row has changed that they may depend on. The live view calls it."""
        if change.view in _VIEWS:
            with self._lock:
                self._changes += 1
                self._known.clear()

    def of(self, fact: Callable[[GetRow, str], _T], name: str) -> _T:
        """Return a fact of a name: what `fact` returns for the look-up of rows and the name."""
        found: Any = self._known.get((fact, name), _UNKNOWN)
        if found is not _UNKNOWN:
            return found  # type: ignore[no-any-return]
        changes, found = self._changes, fact(self._get, name)
        with self._lock:
            if len(self._known) >= _FACTS:
                self._known.clear()
            if changes == self._changes:
                self._known[fact, name] = found
        return found  # type: ignore[no-any-return]


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
    """

    def __init__(
        self,
        live_view: LiveView,
        names: NameFacts,
        mailboxes: MailboxIndex,
        jobs: LiveJobs,
        topics: TopicsBySubscriber,
    ) -> None:
        self._live_view = live_view
        self._names = names
        self._mailboxes = mailboxes
        self._jobs = jobs
        self._topics = topics
        self._rates: TokenBuckets[tuple[str, str]] = TokenBuckets(1, 1, most=_MOST)
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
        if until is not None and until > time.monotonic():
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
        self._full_until[recipient] = time.monotonic() + RETRY_AFTER_S
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
