"""Those who wait for the verdict on one position: threads and asyncio tasks, woken by the tail thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from connectors.live.settled_feed import SettledRecord
from connectors.log.publisher import Position

_Promise = Future[SettledRecord | None]
_AsyncPromise = asyncio.Future[SettledRecord | None]


class SettledWaits:
    """Promises by position. A promise yields None when its record was passed over, not settled. Thread-safe.

    Add a promise first and then look whether the record is settled already: so none is missed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: dict[Position, list[_Promise | _AsyncPromise]] = {}

    def add(self, position: Position, promise: _Promise | _AsyncPromise) -> None:
        """Keep `promise` (of the running event loop, if it is asyncio's) until `position` is settled."""
        with self._lock:
            self._promises.setdefault(position, []).append(promise)

    def remove(self, position: Position, promise: _Promise | _AsyncPromise) -> None:
        """Forget a promise, kept or not."""
        with self._lock:
            waiting = self._promises.get(position, [])
            if promise in waiting:
                waiting.remove(promise)
            if not waiting:
                self._promises.pop(position, None)

    def keep(self, records: Sequence[SettledRecord], passed_over: Sequence[Position] = ()) -> None:
        """Keep the promises for what was settled; each event loop is woken once."""
        if not self._promises:
            return
        kept: list[tuple[_Promise | _AsyncPromise, SettledRecord | None]] = []
        with self._lock:
            for record in records:
                kept += [(promise, record) for promise in self._promises.pop(record.position, ())]
            for position in passed_over:
                kept += [(promise, None) for promise in self._promises.pop(position, ())]
        self.resolve(kept)

    def fail(self, error: Exception) -> None:
        """Break every promise with `error`."""
        with self._lock:
            broken = [promise for promises in self._promises.values() for promise in promises]
            self._promises.clear()
        self.resolve([(promise, error) for promise in broken])

    @staticmethod
    def resolve(
        answers: Sequence[tuple[_Promise | _AsyncPromise, SettledRecord | Exception | None]],
    ) -> None:
        """Answer promises, from any thread; each event loop is woken once."""
        by_loop: dict[
            asyncio.AbstractEventLoop, list[tuple[_AsyncPromise, SettledRecord | Exception | None]]
        ] = {}
        for promise, answer in answers:
            if isinstance(promise, Future):
                _answer(promise, answer)
            else:
                by_loop.setdefault(promise.get_loop(), []).append((promise, answer))
        for loop, of_loop in by_loop.items():
            with suppress(RuntimeError):  # a loop that has ended waits no more
                loop.call_soon_threadsafe(_answer_all, of_loop)


def _answer_all(answers: Sequence[tuple[_AsyncPromise, SettledRecord | Exception | None]]) -> None:
    for promise, answer in answers:
        _answer(promise, answer)


def _answer(promise: _Promise | _AsyncPromise, answer: SettledRecord | Exception | None) -> None:
    if promise.done():
        return
    if isinstance(answer, Exception):
        promise.set_exception(answer)
    else:
        promise.set_result(answer)
