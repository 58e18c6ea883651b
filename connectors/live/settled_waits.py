"""The threads and asyncio tasks that wait for the verdict on a position, woken by the live view's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from connectors.live.settled_feed import SettledRecord
from connectors.log.publisher import Position

_Answer = SettledRecord | Exception | None
_Promise = Future[SettledRecord | None]
_AsyncPromise = asyncio.Future[SettledRecord | None]


class SettledWaits:
    """Promises (futures) by position. Thread-safe.

    A promise yields None if its record was skipped instead of settled. A caller first adds its promise and then
    checks whether the record is already settled, so that it misses none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: dict[Position, list[_Promise | _AsyncPromise]] = {}

    def add(self, position: Position, promise: _Promise | _AsyncPromise) -> None:
        """Remember `promise` (of the running event loop, if it is asyncio's) until `position` is settled."""
        with self._lock:
            self._promises.setdefault(position, []).append(promise)

    def remove(self, position: Position, promise: _Promise | _AsyncPromise) -> None:
        """Forget a promise, whether or not it is resolved."""
        with self._lock:
            waiting = self._promises.get(position, [])
            if promise in waiting:
                waiting.remove(promise)
            if not waiting:
                self._promises.pop(position, None)

    def keep(self, records: Sequence[SettledRecord], passed_over: Sequence[Position] = ()) -> None:
        """Resolve the promises for settled and skipped records; each event loop is woken once."""
        if not self._promises:
            return
        found: list[tuple[Position, SettledRecord | None]] = [(record.position, record) for record in records]
        found += [(position, None) for position in passed_over]
        with self._lock:
            kept = [(one, record) for position, record in found for one in self._promises.pop(position, ())]
        self.resolve(kept)

    def fail(self, error: Exception) -> None:
        """Fail every promise with `error`."""
        with self._lock:
            broken = [promise for promises in self._promises.values() for promise in promises]
            self._promises.clear()
        self.resolve([(promise, error) for promise in broken])

    @staticmethod
    def resolve(answers: Sequence[tuple[_Promise | _AsyncPromise, _Answer]]) -> None:
        """Resolve promises, from any thread; each event loop is woken once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_AsyncPromise, _Answer]]] = {}
        for promise, answer in answers:
            if isinstance(promise, Future):
                _answer(promise, answer)
            else:
                by_loop.setdefault(promise.get_loop(), []).append((promise, answer))
        for loop, of_loop in by_loop.items():
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_answer_all, of_loop)


def _answer_all(answers: Sequence[tuple[_AsyncPromise, _Answer]]) -> None:
    for promise, answer in answers:
        _answer(promise, answer)


def _answer(promise: _Promise | _AsyncPromise, answer: _Answer) -> None:
    if promise.done():
        return
    if isinstance(answer, Exception):
        promise.set_exception(answer)
    else:
        promise.set_result(answer)
