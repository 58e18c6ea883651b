"""The newest settled records in memory, which readers follow by a cursor, and the waits for single records.

The live view's thread adds records, any thread reads them, and asyncio tasks wait for them. Readers have no
queue of their own. A reader that is too slow gets `FellBehind`, and costs no memory before that. `SettledWaits`
wakes the threads and asyncio tasks that wait for the verdict on one position.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import msgspec

from schemas.wire.record import Position

FEED_RECORDS: Final = 20_000
FEED_BYTES: Final = 32 * 1024 * 1024
# The memory of a record beside its value: the struct, its strings, its places in ring and index.
_RECORD_OVERHEAD_BYTES: Final = 700


class SettledRecord(msgspec.Struct, frozen=True, gc=False):
    """One record of the log and its verdict by the fold.

    Attributes:
        stream: The record's stream, such as `job/0a1b2c3d`.
        type: The record's type; None, like `ce_id` and `principal`, if the headers are invalid.
        ce_id: The record's CloudEvents id.
        principal: The door and the principal that the record came from, as `<door>/<principal>`.
        verdict: accepted, duplicate or rejected.
        reason: The reason of a rejection, such as `bad_signature`.
        why: An explanation of the rejection in a few words.
        late: Whether an event was accepted although a higher seq was settled before it.
        status_after: The status of the stream after the record, such as `running`; None if it has none.
        seq: The number of an event within its job; None for other records.
        value: The body as it may be shown, with secrets masked.
        logged_at_us: Kafka's append time in microseconds since 1970 UTC.
    """

    position: Position
    stream: str
    type: str | None
    ce_id: str | None
    principal: str | None
    verdict: str
    reason: str | None
    why: str | None
    late: bool
    status_after: str | None
    seq: int | None
    logged_at_us: int
    value: bytes | None


_Answer = SettledRecord | Exception | None
_Promise = Future[SettledRecord | None]


class FellBehind(Exception):
    """The records after a cursor are no longer all in memory. `oldest` is the smallest cursor that works."""

    def __init__(self, cursor: int, oldest: int) -> None:
        super().__init__(f"cursor {cursor} is gone, the oldest is {oldest}")
        self.oldest = oldest


class SettledFeed:
    """A ring buffer of the newest settled records. Thread-safe.

    The records of this process are numbered from 1. A reader's cursor is the number of the last record that it
    has read, 0 at the start. `newest` is the number of the newest record, 0 while there is none.

    Args:
        limit_records: The largest number of records to keep. The oldest are removed.
        limit_bytes: The largest memory for them in bytes, by estimate. The newest record is always kept.
    """

    def __init__(self, limit_records: int = FEED_RECORDS, limit_bytes: int = FEED_BYTES) -> None:
        self._limit_records = limit_records
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._ring: dict[int, SettledRecord] = {}  # by cursor, without a gap: any place is found at once
        self._cursors: dict[Position, int] = {}
        self._bytes = 0
        self._waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        self.newest = 0

    def extend(self, records: Sequence[SettledRecord]) -> None:
        """Add records, remove the oldest if there are too many, and wake the callers of `wait_beyond`.

        Only the live view's thread calls this.
        """
        if not records:
            return
        with self._lock:
            for record in records:
                self.newest += 1
                self._ring[self.newest] = record
                self._cursors[record.position] = self.newest
                self._bytes += _size(record)
            while len(self._ring) > 1 and self._is_too_large():
                cursor = self._oldest() + 1
                gone = self._ring.pop(cursor)
                self._bytes -= _size(gone)
                # Another cursor is here if the position came again, in a log that was created again.
                if self._cursors.get(gone.position) == cursor:
                    del self._cursors[gone.position]
            waiting, self._waiting = self._waiting, {}
        for loop, futures in waiting.items():
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_wake, futures)

    def since(self, cursor: int, limit: int, limit_bytes: int | None = None) -> tuple[list[SettledRecord], int]:
        """Return at most `limit` records after `cursor`, oldest first, and the cursor for the next call.

        With `limit_bytes`, the values of all but the first record have no more bytes than that together. A
        reader that is slow keeps the records of its last call in memory.

        It never blocks. Without new records, it returns an empty list and the same cursor. Raises FellBehind if
        some of the records after `cursor` are no longer in memory.
        """
        with self._lock:
            if cursor < self._oldest():
                raise FellBehind(cursor, self._oldest())
            last = min(cursor + limit, self.newest)
            found = [self._ring[number] for number in range(cursor + 1, last + 1)]
        if limit_bytes is not None:
            for place, record in enumerate(found):
                limit_bytes -= len(record.value or b"")
                if limit_bytes < 0 and place > 0:
                    return found[:place], cursor + place
        return found, max(cursor, last)

    def find(self, position: Position) -> SettledRecord | None:
        """Return the record at `position`, or None if it is not in memory."""
        with self._lock:
            cursor = self._cursors.get(position)
            return None if cursor is None else self._ring[cursor]

    async def wait_beyond(self, cursor: int) -> None:
        """Wait, without a time limit, until there is a record after `cursor`; then `since` returns it.

        An asyncio task of any event loop may call this. Cancel the task to end the wait.
        """
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if self.newest > cursor:
                    return
                future: asyncio.Future[None] = loop.create_future()
                self._waiting.setdefault(loop, []).append(future)
            try:
                await future
            except asyncio.CancelledError:
                self._forget(loop, future)
                raise

    def _oldest(self) -> int:
        """Return the smallest cursor that works."""
        return self.newest - len(self._ring)

    def _is_too_large(self) -> bool:
        return len(self._ring) > self._limit_records or self._bytes > self._limit_bytes

    def _forget(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        with self._lock:
            futures = self._waiting.get(loop, [])
            if future in futures:
                futures.remove(future)
            if not futures:
                self._waiting.pop(loop, None)


def _size(record: SettledRecord) -> int:
    return _RECORD_OVERHEAD_BYTES + len(record.value or b"")


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class SettledWaits:
    """The futures of callers that wait until the record at a position of the log is settled. Thread-safe.

    The result of a future is the settled record. It is None if the record was skipped because the state loaded
    from the tables includes it. A caller first adds its future and then checks whether the record is already
    settled, so that it misses no record.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: dict[Position, list[_Promise]] = {}

    def add(self, position: Position, promise: _Promise) -> None:
        """Register the future `promise`, which `keep` resolves when the record at `position` is settled.

        Callers create the future. Several futures may wait for one position.
        """
        with self._lock:
            self._promises.setdefault(position, []).append(promise)

    def remove(self, position: Position, promise: _Promise) -> None:
        """Unregister the future `promise`, whether or not it is resolved. An unregistered one is ignored."""
        with self._lock:
            waiting = self._promises.get(position, [])
            if promise in waiting:
                waiting.remove(promise)
            if not waiting:
                self._promises.pop(position, None)

    def keep(self, records: Sequence[SettledRecord], passed_over: Sequence[Position] = ()) -> None:
        """Resolve and unregister the futures of the callers that wait for these records.

        Args:
            records: Newly settled records. Each is the result of its futures.
            passed_over: The positions of records that were skipped. The result of their futures is None.
        """
        if not self._promises:
            return
        found: list[tuple[Position, SettledRecord | None]] = [(record.position, record) for record in records]
        found += [(position, None) for position in passed_over]
        with self._lock:
            kept = [(one, record) for position, record in found for one in self._promises.pop(position, ())]
        for promise, record in kept:
            _answer(promise, record)

    def fail(self, error: Exception) -> None:
        """Unregister every future and let it raise `error`, because the live view stops."""
        with self._lock:
            broken = [promise for promises in self._promises.values() for promise in promises]
            self._promises.clear()
        for promise in broken:
            _answer(promise, error)


def _answer(promise: _Promise, answer: _Answer) -> None:
    if promise.done():
        return
    if isinstance(answer, Exception):
        promise.set_exception(answer)
    else:
        promise.set_result(answer)
