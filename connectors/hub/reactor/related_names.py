"""The indexes of the reactor's rules: the sessions made for each job, and the topics of each subscriber."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.streams.session.session_registry import SessionRow
from schemas.streams.topic.topic_registry import SubscriptionRow


class SessionsByJob:
    """The sessions that were made for each job, and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, set[str]] = {}

    def made_for(self, job_id: str) -> list[str]:
        """Return the names of the sessions that were made for a job and have not ended, in no order."""
        with self._lock:
            return list(self._names.get(job_id, ()))

    def add(self, row: Row | None) -> None:
        """Note the session of `row`, or its end, if it was made for a job. Ignore any other row and None."""
        if not isinstance(row, SessionRow) or row.for_job is None:
            return
        with self._lock:
            names = self._names.setdefault(row.for_job, set())
            if row.is_live:
                names.add(row.session)
            else:
                names.discard(row.session)
            if not names:
                del self._names[row.for_job]


class TopicsBySubscriber:
    """The topics of each subscriber, by the live rows of subscriptions. Thread-safe.

    Register `changed` with the live view before it opens, and call `load` once it is open.
    """

    follows = (SubscriptionRow,)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: dict[str, set[str]] = {}
        # Until `load` has ended: the keys that `changed` brought, because `load` may bring older rows of them.
        self._changed: set[str] | None = set()

    def topics_of(self, subscriber: str) -> list[str]:
        """Return the names of the topics of a subscriber, in no order."""
        with self._lock:
            return list(self._topics.get(subscriber, ()))

    def count(self, subscriber: str) -> int:
        """Return the number of topics of a subscriber."""
        with self._lock:
            return len(self._topics.get(subscriber, ()))

    def load(self, rows: Iterable[SubscriptionRow]) -> None:
        """Note the subscriptions that the live view contains when it is open. Call it once."""
        for row in rows:
            with self._lock:
                if self._changed is None or row.key not in self._changed:
                    self._add(row)
        with self._lock:
            self._changed = None

    def changed(self, change: AppliedChange) -> None:
        """Note a subscription, or its end, when the live view's thread reports it. Ignore any other row."""
        if not isinstance(change.row, SubscriptionRow):
            return
        with self._lock:
            if self._changed is not None:
                self._changed.add(change.key)
            self._add(change.row)

    def _add(self, row: SubscriptionRow) -> None:
        topics = self._topics.setdefault(row.subscriber, set())
        if row.is_live:
            topics.add(row.topic)
        else:
            topics.discard(row.topic)
        if not topics:
            del self._topics[row.subscriber]
