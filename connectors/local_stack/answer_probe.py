"""Asks a part that is ready whether it still answers."""

from __future__ import annotations

import threading
from collections.abc import Callable

EVERY_S = 3.0
MISSES = 3


class AnswerProbe:
    """Asks every few seconds, on a thread of its own, so that nobody waits for an answer that does not come.
    `is_silent`: whether the last three requests had none.
    """

    def __init__(self, name: str, is_well: Callable[[], bool]) -> None:
        self.is_silent = False
        self._is_well = is_well
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name=f"probe-{name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ask no more. Does not wait for a request that is under way."""
        self._over.set()

    def _ask(self) -> None:
        missed = 0
        while not self._over.wait(EVERY_S):
            missed = 0 if self._is_well() else missed + 1
            self.is_silent = missed >= MISSES
