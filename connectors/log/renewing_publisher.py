"""A holder of a publisher that makes a new one after a failure."""

from __future__ import annotations

import threading

from connectors.log.publisher import Publisher
from schemas.keys.record_macs import GATEWAY
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings


class RenewingPublisher:
    """A holder of one publisher, which `live` replaces after a failure. Thread-safe; end it with `close`.

    `signer` is as for `Publisher`. Records wait `linger_ms` for others. The end of a publisher waits `close_s`
    seconds for acknowledgements.
    """

    def __init__(
        self, settings: Settings, *, signer: str = GATEWAY, linger_ms: int = 0, close_s: float = 5.0
    ) -> None:
        self._settings = settings
        self._signer = signer
        self._linger_ms = linger_ms
        self._close_s = close_s
        self._lock = threading.Lock()
        self._current: Publisher | None = None

    def live(self) -> Publisher:
        """Return a publisher that has not failed. If there is none, check the topic and open a new one.

        The holder closes the publisher, not the caller. Call `live` again after an append has failed.

        Raises:
            BackboneUnreachable: Kafka cannot be reached within 10 s.
            TrunklineError: the topic does not fit the settings.
        """
        with self._lock:
            if self._current is not None and self._current.failed:
                self._end()
            if self._current is None:
                check_topic(self._settings)
                self._current = Publisher(self._settings, signer=self._signer, linger_ms=self._linger_ms)
            return self._current

    def close(self) -> None:
        """Close the current publisher, if there is one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._current is not None:
            publisher, self._current = self._current, None
            publisher.close(self._close_s)
