"""The newest records that one reader of the log passes on to a second one in the same process.

The second reader needs them a little later. So it fetches from Kafka only what the first one had read before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from schemas.wire.record import Record

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
