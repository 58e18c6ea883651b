"""The indexes of the reactor's rules: the sessions made for each job, and the topics of each subscriber."""

from __future__ import annotations

import threading

from connectors.hub.live.ordered_rows import RowIndex
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


class TopicsBySubscriber(RowIndex[SubscriptionRow]):
    """The topics of each subscriber, by the live rows of subscriptions. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(SubscriptionRow)
        self._topics: dict[str, set[str]] = {}

    def topics_of(self, subscriber: str) -> list[str]:
        """Return the names of the topics of a subscriber, in no order."""
        with self._lock:
            return list(self._topics.get(subscriber, ()))

    def count(self, subscriber: str) -> int:
        """Return the number of topics of a subscriber."""
        with self._lock:
            return len(self._topics.get(subscriber, ()))

    def _add(self, row: SubscriptionRow) -> None:
        topics = self._topics.setdefault(row.subscriber, set())
        if row.is_live:
            topics.add(row.topic)
        else:
            topics.discard(row.topic)
        if not topics:
            del self._topics[row.subscriber]
