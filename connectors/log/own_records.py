"""The records of this process that are on their way through the log, until its reader has them.

A record of ours that a reader of the log gets is stored by all in-sync replicas, for Kafka shows no other ones.
A producer with one request in flight keeps the order of each partition, so only the oldest of ours can come.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from schemas.wire.record import Record

log = structlog.stdlib.get_logger(__name__)


class OwnRecord:
    """One record on its way. `done` is called once: with what the reader made of it, or with an error.

    Args:
        done: Called by the reader, or by the publisher in the case of an error.
        came_back: Called before it if the record came back.
    """

    __slots__ = ("_came_back", "_done", "_is_done", "header_values", "value")

    def __init__(self, done: Callable[[Any], None], came_back: Callable[[], None]) -> None:
        self._done = done
        self._came_back = came_back
        self._is_done = False
        self.header_values: tuple[bytes | None, ...] = ()
        self.value: bytes | None = None

    def done(self) -> bool:
        """Return whether it came back or failed."""
        return self._is_done

    def settle(self, found: Any) -> None:
        """Hand over what the reader made of it."""
        self._is_done = True
        self._came_back()
        self._done(found)

    def set_exception(self, error: Exception) -> None:
        """Hand over an error, unless it came back meanwhile."""
        if not self._is_done:
            self._is_done = True
            self._done(error)


class OwnRecords:
    """The records on their way, by partition in the order in which they were sent.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[OwnRecord]] = {}

    def expect(
        self, partition: int, sent: OwnRecord, header_values: tuple[bytes | None, ...], value: bytes
    ) -> None:
        """Wait for a record that is about to be sent."""
        sent.header_values, sent.value = header_values, value
        with self._lock:
            waiting = self._waiting.setdefault(partition, deque())
            # For as long as Kafka stores nothing, the reader removes none of those that have failed.
            while waiting and waiting[0].done():
                waiting.popleft()
            waiting.append(sent)

    def seen(self, record: Record) -> OwnRecord | None:
        """Return the record on its way that the reader has got now. None: it is of somebody else."""
        with self._lock:
            waiting = self._waiting.get(record.partition)
            while waiting:
                oldest = waiting[0]
                if oldest.done():  # it has failed
                    waiting.popleft()
                    continue
                if oldest.value != record.value or oldest.header_values != record.header_values:
                    return None
                return waiting.popleft()
        return None

    def take_all(self) -> list[OwnRecord]:
        """Return all records on their way, and expect none of them any more."""
        with self._lock:
            found = [sent for waiting in self._waiting.values() for sent in waiting if not sent.done()]
            self._waiting.clear()
        return found


def settle_own(settled: Iterable[tuple[OwnRecord, Any]]) -> None:
    """Hand over what the reader made of records. An error of who is told is logged, and holds up no other."""
    for sent, found in settled:
        try:
            sent.settle(found)
        except Exception:
            log.exception("own_record_failed")
