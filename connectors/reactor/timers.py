"""Timers: append a record when a moment comes that a row of the live view names.

An idle log has no clock, so the reactor's clock gives the impulse, and the fold compares the record's own time.

**Reads** the rows of one view. **Owns** no lasting state.
**Guarantees** a record within about a second after the moment. Every gateway has timers. The id of the record
follows from the row alone, so the fold counts it once. **On restart** the timers look at all rows again.
"""

from __future__ import annotations

import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Generic

import structlog

from connectors.background.background_service import ThreadedService
from connectors.live.live_view import LiveView
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import RowT
from schemas.wire.record import OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

_TICK_S: Final = 0.5
# So many records at once, and more after a pause, in which the log takes them.
_AT_ONCE: Final = 500
_PAUSE_S: Final = 0.05
# Kafka's clock decides, and it may be a little behind this one.
_MARGIN_US: Final = 100_000
# The record may be lost on its way, or Kafka's clock be far behind.
_AGAIN_US: Final = 5_000_000
_STOP_S: Final = 5.0
# Moments that no longer count are removed when they are more than those that count, and this number.
_OBSOLETE: Final = 1000


class Timers(ThreadedService, ABC, Generic[RowT]):
    """A background thread of the gateway that appends a record for each row whose moment has come.

    `close` stops the thread. A subclass says which moment a row has, and which record it needs then.

    Args:
        name: The name of the thread.
        row_type: The type of the rows.
        live_view: The live view, which contains the rows.
        append: Appends a record to the log, without waiting for Kafka's acknowledgement. As long as the row
            does not change, the same record is appended again every five seconds.
    """

    def __init__(
        self,
        name: str,
        row_type: type[RowT],
        live_view: LiveView,
        append: Callable[[OutgoingRecord], None],
    ) -> None:
        super().__init__(name, _STOP_S)
        self._row_type = row_type
        self._live_view = live_view
        self._append = append
        self._lock = threading.Lock()
        # Set when a row needs a record at once, so that runs which were missed follow each other quickly.
        self._wake = threading.Event()
        # By the key of the row: when to look at it, in microseconds since 1970 UTC.
        self._due_at: dict[str, int] = {}
        # The same as a heap, and moments that `_due_at` no longer has.
        self._heap: list[tuple[int, str]] = []

    @abstractmethod
    def moment_of(self, row: RowT) -> int | None:
        """Return when the row next needs a record, in microseconds since 1970 UTC, or None for never."""

    @abstractmethod
    def record_of(self, row: RowT, now_us: int) -> OutgoingRecord:
        """Return the record that a row needs at the time `now_us`, its moment or a later one."""

    def open(self) -> None:
        """Read all rows from the live view and start the thread. Call it once, when the live view is open."""
        for row in self._live_view.live(self._row_type):
            self._note(row.key, row)
        super().open()

    def close(self) -> None:
        """Ask the thread to end, and wait for it at most five seconds."""
        self._closing.set()
        self._wake.set()
        super().close()

    def on_change(self, change: AppliedChange) -> None:
        """Remember the moment of a changed row; ignore any row of another view.

        Register this method with `LiveView.on_change`. The live view calls it on its own thread.
        """
        if change.view == self._row_type.VIEW:
            self._note(change.key, change.row if isinstance(change.row, self._row_type) else None)

    def _note(self, key: str, row: RowT | None) -> None:
        moment = None if row is None else self.moment_of(row)
        with self._lock:
            if moment is None:
                self._due_at.pop(key, None)
            elif self._due_at.get(key) != moment + _MARGIN_US:
                self._set(key, moment + _MARGIN_US)
                if moment + _MARGIN_US <= time.time_ns() // 1000:
                    self._wake.set()

    def _set(self, key: str, due_at: int) -> None:
        self._due_at[key] = due_at
        heapq.heappush(self._heap, (due_at, key))
        if len(self._heap) > 2 * len(self._due_at) + _OBSOLETE:
            self._heap = [(at, known) for known, at in self._due_at.items()]
            heapq.heapify(self._heap)

    def _next_due(self, now_us: int) -> str | None:
        """Return the key of a row whose moment has come, to be looked at again later; None: no more."""
        with self._lock:
            while self._heap and self._heap[0][0] <= now_us:
                due_at, key = heapq.heappop(self._heap)
                if self._due_at.get(key) == due_at:
                    self._set(key, now_us + _AGAIN_US)
                    return key
        return None

    def _look(self) -> bool:
        """Append records of rows whose moment has come. Return whether there may be more of them."""
        now_us = time.time_ns() // 1000
        for _ in range(_AT_ONCE):
            key = self._next_due(now_us)
            if key is None:
                return False
            row = self._live_view.get(self._row_type, key)
            moment = None if row is None else self.moment_of(row)
            if row is not None and moment is not None and moment <= now_us:
                self._append(self.record_of(row, now_us))
            else:
                # The row changed while `open` read it.
                self._note(key, row)
        return True

    def _run(self) -> None:
        pause_s = _TICK_S
        while not self._closing.is_set():
            self._wake.wait(pause_s)
            self._wake.clear()
            try:
                pause_s = _PAUSE_S if self._look() else _TICK_S
            except Exception:
                log.exception("timers_failed", timers=self._thread.name)
