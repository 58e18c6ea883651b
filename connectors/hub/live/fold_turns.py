"""Where the live view folds, on the thread that fetches records or on an event loop, and at which pace."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from schemas.wire.record import Record

# The batches that wait for the event loop, before the thread fetches no more.
_BATCHES: Final = 3
_LOOK_S: Final = 0.2
# Each poll that returns records wakes the waiting threads. At a high rate of records the view pauses before a
# poll to take several together: twice as long if many came at once, because the processor is busy then.
_TOGETHER_PER_S: Final = 800
_TOGETHER_S: Final = 0.005
_MANY: Final = 8
_LATELY_S: Final = 0.1


@dataclass
class Batch:
    """The records of one poll that are not settled yet, and how far it got, by partition."""

    records: deque[Record]
    reached: dict[int, int]
    ends: dict[int, int]


class FoldTurns:
    """Where batches are folded: on the thread that fetches them, or on an event loop, in their order.

    Attributes:
        batches: The batches that were handed to the loop and are not folded, oldest first.
    """

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()

    def use(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Hand over to this loop from now on; None: to no loop."""
        with self._changed:
            self._loop = loop

    def hand_over(self, batch: Batch, fold: Callable[[], None], closing: threading.Event) -> bool:
        """Give a batch to the event loop. Return False if there is none, or it has ended."""
        with self._changed:
            while self._loop is not None and len(self.batches) >= _BATCHES and not closing.is_set():
                self._changed.wait(_LOOK_S)
            if self._loop is None:
                return False
            if self.batches and not batch.records:
                return True  # the next batch says how far this poll came, and it takes no place
            self.batches.append(batch)
            if len(self.batches) == 1:
                try:
                    self._loop.call_soon_threadsafe(fold)
                except RuntimeError:  # it has ended
                    self._loop = None
                    self.batches.clear()
                    return False
            return True

    def done(self, batch: Batch, fold: Callable[[], None]) -> None:
        """Note that records of the oldest batch were folded on the loop, which goes on with the next ones."""
        with self._changed:
            if not batch.records:
                self.batches.popleft()
                self._changed.notify_all()
            if self.batches:
                asyncio.get_running_loop().call_soon(fold)

    @contextmanager
    def alone(self, closing: threading.Event) -> Iterator[None]:
        """Wait until the loop has folded all batches."""
        with self._changed:
            while self.batches and not closing.is_set():
                self._changed.wait(_LOOK_S)
        yield


class Pace:
    """The rate of settled records, over a tenth of a second at a time, and the pause that it asks for."""

    def __init__(self) -> None:
        self._is_fast = False
        self._began, self._counted = 0.0, 0
        self._settled_at, self._last_count = 0.0, 0

    def pause_s(self) -> float:
        """Return how long to wait, in seconds, before the next poll, so that it gets several records."""
        if not self._is_fast or time.monotonic() - self._settled_at >= _TOGETHER_S:
            return 0.0
        return _TOGETHER_S if self._last_count < _MANY else 2 * _TOGETHER_S

    def count(self, records: int) -> None:
        """Count records that were settled just now."""
        self._settled_at, self._last_count = time.monotonic(), records
        self._counted += records
        passed_s = self._settled_at - self._began
        if passed_s >= _LATELY_S:
            self._is_fast = self._counted > _TOGETHER_PER_S * passed_s
            self._began, self._counted = self._settled_at, 0
