"""Records in memory between the publisher and the readers of the log in one process.

`OwnRecords` are on their way through the log, until its reader has them. A record of ours that a reader gets is
stored by all in-sync replicas, for Kafka shows no other ones. A producer with one request in flight keeps the
order of each partition, so only the oldest of ours can come.

`SharedRecords` are the newest ones that one reader passes on to a second one, which needs them a little later.
So it fetches from Kafka only what the first one had read before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

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


# Of records that wait for the second reader. If there are more, it reads them from Kafka.
_RECORDS_MOST: Final = 10_000
_BYTES_MOST: Final = 16 * 1024 * 1024


class SharedRecords:
    """Records that wait for the second reader, by partition in the order of the log.

    Thread-safe. One thread calls `offer`, another one the other methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Record]] = {}
        # By partition: all records from this offset on are here, or were taken, or will be offered.
        self._begins: dict[int, int] = {}
        self._wanted: frozenset[int] = frozenset()
        self._records = self._bytes = 0
        self._arrived = threading.Event()

    def begin(self, offsets: Mapping[int, int]) -> None:
        """Note that the first reader offers all records from these offsets on, by partition."""
        with self._lock:
            self._begins = dict(offsets)

    def want(self, partitions: Collection[int]) -> None:
        """Keep the records of these partitions alone from now on."""
        with self._lock:
            self._wanted = frozenset(partitions)
            for partition in self._waiting.keys() - self._wanted:
                self._forget(partition)

    def offer(self, records: Iterable[Record]) -> None:
        """Add records that follow those of earlier calls in their partitions."""
        with self._lock:
            for record in records:
                if record.partition not in self._wanted:
                    self._begins[record.partition] = record.offset + 1
                    continue
                self._waiting.setdefault(record.partition, deque()).append(record)
                self._records += 1
                self._bytes += _size_of(record)
            if self._records > _RECORDS_MOST or self._bytes > _BYTES_MOST:
                for partition in list(self._waiting):
                    self._forget(partition)
            if self._records:
                self._arrived.set()

    def has(self, partition: int, offset: int) -> bool:
        """Return whether `take` returns all records of a partition from an offset on."""
        with self._lock:
            begin = self._begins.get(partition)
            return begin is not None and offset >= begin

    def take(self, places: Mapping[int, int], most: int) -> list[Record]:
        """Remove and return up to `most` records of some partitions, those from an offset on.

        Args:
            places: By partition: the offset of the first record. If `has` is false for it, none is returned.
            most: The largest number of records.
        """
        found: list[Record] = []
        with self._lock:
            for partition, offset in places.items():
                if offset < self._begins.get(partition, 0):
                    continue
                waiting = self._waiting.get(partition)
                while waiting and len(found) < most:
                    record = waiting.popleft()
                    self._records -= 1
                    self._bytes -= _size_of(record)
                    self._begins[partition] = record.offset + 1
                    if record.offset >= offset:
                        found.append(record)
            if not self._records:
                self._arrived.clear()
        return found

    def wait(self, timeout_s: float) -> None:
        """Wait until there are records, but at most so long."""
        self._arrived.wait(timeout_s)

    def _forget(self, partition: int) -> None:
        waiting = self._waiting.pop(partition)
        if waiting:
            self._begins[partition] = waiting[-1].offset + 1
        self._records -= len(waiting)
        self._bytes -= sum(map(_size_of, waiting))


def _size_of(record: Record) -> int:
    """Return the bytes of a record's value and headers, which may be as long."""
    return sum(map(len, filter(None, (record.value, *record.header_values))))
