"""Timers: append a record when a moment comes that a row of the live view names.

An idle log has no clock, so the reactor's clock gives the impulse, and the fold compares the record's own time.
The timers learn from the answers how far the log's clock differs from theirs, and ask by the log's.

**Reads** the rows of one view. **Owns** no lasting state.
**Guarantees** a record within about a second after the moment. Every gateway has timers. The id of the record
follows from the row alone, so the fold counts it once. **On restart** the timers look at all rows again.
"""

from __future__ import annotations

import functools
import heapq
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic

import structlog

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.log_clock import LogClock
from connectors.hub.live.settled_feed import SettledRecord
from connectors.plumbing.machine.background_service import ThreadedService
from schemas.effects.effects import TIMERS
from schemas.effects.following import Timer
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row, RowT
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.verdicts import REJECTED

log = structlog.stdlib.get_logger(__name__)

_TICK_S: Final = 0.5
# So many records at once, and more after a pause, in which the log takes them.
_AT_ONCE: Final = 500
_PAUSE_S: Final = 0.05
# Kafka's clock decides, and it may be a little behind this one.
_MARGIN_US: Final = 100_000
# The record may be lost on its way. The pause doubles with each attempt.
_AGAIN_US: Final = 5_000_000
_AGAIN_MOST_US: Final = 320_000_000
_STOP_S: Final = 5.0
# Moments that no longer count are removed when they are more than those that count, and this number.
_OBSOLETE: Final = 1000


class Timers(ThreadedService, ABC, Generic[RowT]):
    """A background thread of the gateway that appends a record for each row whose moment has come.

    `close` stops the thread. A subclass says which moment a row has, and which record it needs then.

    Args:
        live_view: The live view, which contains the rows.
        append: Appends a record to the log, without waiting for Kafka's acknowledgement. As long as the row
            does not change, the same record is appended again, with a growing pause from five seconds on.
        log_clock: The log's clock. None: one that nobody sets, which is this process's own.
    """

    thread_name: str
    row_type: type[RowT]

    def __init__(
        self,
        live_view: LiveView,
        append: Callable[[OutgoingRecord], None],
        log_clock: LogClock | None = None,
    ) -> None:
        super().__init__(self.thread_name, _STOP_S)
        self._log_clock = LogClock() if log_clock is None else log_clock
        self._live_view = live_view
        self._append = append
        self._lock = threading.Lock()
        # Set when a row needs a record at once, so that runs which were missed follow each other quickly.
        self._wake = threading.Event()
        # By the key of the row: the pause after the last attempt, in microseconds.
        self._pauses: dict[str, int] = {}
        # By the key of the row: when to look at it, in microseconds since 1970 UTC by this process's clock.
        self._due_at: dict[str, int] = {}
        # The same as a heap, and moments that `_due_at` no longer has.
        self._heap: list[tuple[int, str]] = []

    @abstractmethod
    def moment_of(self, row: RowT) -> int | None:
        """Return when the row next needs a record, in microseconds since 1970 UTC, or None for never."""

    @abstractmethod
    def stream_of(self, row: RowT) -> str:
        """Return the stream of the records about a row."""

    @abstractmethod
    def record_of(self, row: RowT, now_us: int) -> OutgoingRecord:
        """Return the record that a row needs at the log's time `now_us`, its moment or a later one."""

    def open(self) -> None:
        """Read all rows from the live view and start the thread. Call it once, when the live view is open."""
        for row in self._live_view.live(self.row_type):
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
        if change.view == self.row_type.VIEW:
            self._note(change.key, change.row if isinstance(change.row, self.row_type) else None)

    def _note(self, key: str, row: RowT | None) -> None:
        due_at = None if row is None else self._due_of(row)
        with self._lock:
            self._pauses.pop(key, None)
            if due_at is None:
                self._due_at.pop(key, None)
            elif self._due_at.get(key) != due_at:
                self._set(key, due_at)
                if due_at <= self._log_clock.clock_us():
                    self._wake.set()

    def _due_of(self, row: RowT) -> int | None:
        """Return when to look at a row by this process's clock, or None for never."""
        moment = self.moment_of(row)
        if moment is None:
            return None
        return moment + _MARGIN_US - self._log_clock.offset_us(self.stream_of(row))

    def _answered(self, key: str, settled: SettledRecord) -> None:
        """Look again at the right time, if a record came too early. The live view calls it on its thread."""
        row = self._live_view.get(self.row_type, key) if settled.verdict == REJECTED else None
        due_at = None if row is None else self._due_of(row)
        with self._lock:
            if due_at is not None and key in self._due_at and due_at > self._log_clock.clock_us():
                self._set(key, due_at)

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
                    pause_us = self._pauses.get(key, _AGAIN_US)
                    self._pauses[key] = min(2 * pause_us, _AGAIN_MOST_US)
                    self._set(key, now_us + pause_us)
                    return key
        return None

    def _look(self) -> bool:
        """Append records of rows whose moment has come. Return whether there may be more of them."""
        for _ in range(_AT_ONCE):
            key = self._next_due(self._log_clock.clock_us())
            if key is None:
                return False
            row = self._live_view.get(self.row_type, key)
            moment = None if row is None else self.moment_of(row)
            now_us = self._log_clock.now_us(None if row is None else self.stream_of(row))
            if row is not None and moment is not None and moment <= now_us:
                record = self.record_of(row, now_us)
                self._log_clock.ask(record.ce_id, functools.partial(self._answered, key))
                self._append(record)
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


def timers_of_kinds(*args: Any) -> list[KindTimers]:
    """Return the timers of all kinds of streams that declare some. `args` are those of `Timers`."""
    return [KindTimers(kind, timer, *args) for kind, timer in TIMERS.items()]


class KindTimers(Timers[Row]):
    """The timers of all rows of a kind of stream. For the other arguments see `Timers`.

    Args:
        kind: The name of the kind, such as `mailbox`.
        timer: The moments and records that the kind declares.
    """

    def __init__(self, kind: str, timer: Timer, *args: Any) -> None:
        self.thread_name, self.row_type, self._timer = f"{kind}-timers", timer.row_type, timer
        self.follows = (timer.row_type,)
        super().__init__(*args)

    def stream_of(self, row: Row) -> str:
        """Return the stream of the records about a row."""
        return self._timer.stream_of(row)

    def moment_of(self, row: Row) -> int | None:
        """Return when the row next needs a record, in microseconds since 1970 UTC, or None for never."""
        return self._timer.moment_of(row, self._log_clock.now_us())

    def record_of(self, row: Row, now_us: int) -> OutgoingRecord:
        """Return the record that the row needs at the log's time `now_us`."""
        return self._timer.record_of(row, now_us, self._live_view.get)
