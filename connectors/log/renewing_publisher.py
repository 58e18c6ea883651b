"""A publisher that is replaced by a new one after it has failed."""

from __future__ import annotations

import threading

from connectors.log.publisher import Publisher
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings


class RenewingPublisher:
    """Opens a publisher when one is needed and there is none that works. Thread-safe; `close` it at the end.

    `linger_ms` is that of the publishers. `close_s` is how long the end of one waits for its last records.
    """

    def __init__(self, settings: Settings, *, linger_ms: int = 0, close_s: float = 5.0) -> None:
        self._settings = settings
        self._linger_ms = linger_ms
        self._close_s = close_s
        self._lock = threading.Lock()
        self._current: Publisher | None = None

    def live(self) -> Publisher:
        """Return a publisher that has not failed.

        Raises:
            BackboneUnreachable: Kafka cannot be reached.
            TrunklineError: the topic does not fit the settings.
        """
        with self._lock:
            if self._current is not None and self._current.failed:
                self._end()
            if self._current is None:
                check_topic(self._settings)
                self._current = Publisher(self._settings, linger_ms=self._linger_ms)
            return self._current

    def close(self) -> None:
        """End the publisher, if there is one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._current is not None:
            publisher, self._current = self._current, None
            publisher.close(self._close_s)
