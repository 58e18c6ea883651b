"""The records of this process that are on their way through the log, until its reader has them.

A record of ours that a reader of the log gets is stored by all in-sync replicas, for Kafka shows no other ones.
A producer with one request in flight keeps the order of each partition, so only the oldest of ours can come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from schemas.wire.record import Record


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

    Thread-safe for any publishers, which take turns by themselves, and one reader.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[OwnRecord]] = {}

    def expect(
        self, partition: int, sent: OwnRecord, header_values: tuple[bytes | None, ...], value: bytes
    ) -> None:
        """Wait for a record that is about to be sent."""
        sent.header_values, sent.value = header_values, value
        self._waiting.setdefault(partition, deque()).append(sent)

    def seen(self, record: Record) -> OwnRecord | None:
        """Return the record on its way that the reader has got now. None: it is of somebody else."""
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
