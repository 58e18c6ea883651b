"""A watchdog that ends the process when a handler blocks the event loop, which stops all other handlers too.

The messages in progress are given back when the next process starts. A message whose handler does this three
times is dead (XP-13).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

log = structlog.stdlib.get_logger(__name__)

EXIT_BLOCKED: Final = 70
_BEAT_S: Final = 0.25
_LOOK_S: Final = 0.25
# On a machine under load the loop runs late, through no fault of a handler.
MARGIN_S: Final = 1.0


class LoopWatchdog:
    """A thread that checks whether the event loop still runs. Start it in the loop's thread.

    `limit_of` is called in the watchdog's thread. It returns how long the current task may keep the loop, in
    seconds, and its listener. The watchdog cannot see code that holds Python's global interpreter lock while it
    blocks, as a C extension may.
    """

    def __init__(
        self,
        limit_of: Callable[[asyncio.Task[object] | None], tuple[float, str]],
        end: Callable[[int], object] = os._exit,
        margin_s: float = MARGIN_S,
    ) -> None:
        self._margin_s = margin_s
        self._limit_of = limit_of
        self._end = end
        self._beat_at = time.monotonic()
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self._loop is not None:
            self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._stopping.wait(_LOOK_S):
            now = time.monotonic()
            was_held, looked_at = now - looked_at > 4 * _LOOK_S, now
            if was_held:
                # The whole process was stopped, as by SIGSTOP. Let the loop run first.
                self._beat_at = now
                continue
            held_s = now - self._beat_at
            if held_s <= self._margin_s:
                continue
            task = None if self._loop is None else asyncio.current_task(self._loop)
            limit_s, whose = self._limit_of(task)
            if held_s > limit_s + self._margin_s + _BEAT_S:
                log.error("event_loop_blocked", listener=whose, blocked_s=round(held_s, 1), limit_s=limit_s)
                self._end(EXIT_BLOCKED)
                return
