"""Growing pauses between endless attempts, and a fixed number of attempts."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Final, TypeVar

T = TypeVar("T")

_LOG_AGAIN_S: Final = 60.0


class Backoff:
    """Pauses between attempts: `first_s` seconds, then twice as long each time, up to `most_s`.

    Not thread-safe: one thread makes the attempts.
    """

    def __init__(self, first_s: float = 0.1, most_s: float = 1.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._pause_s = first_s
        self._logged, self._logged_at = "", -inf

    def reset(self) -> None:
        """Begin with the shortest pause again, after an attempt that succeeded."""
        self._pause_s = self._first_s

    def next_s(self) -> float:
        """Return the pause before the next attempt, in seconds."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._most_s)
        return pause_s

    def is_to_log(self, reason: str) -> bool:
        """Return whether to log why an attempt failed: each new reason, and the same one once a minute."""
        if reason == self._logged and time.monotonic() - self._logged_at <= _LOG_AGAIN_S:
            return False
        self._logged, self._logged_at = reason, time.monotonic()
        return True


def retry(action: Callable[[], T], on: tuple[type[Exception], ...], times: int, pause_s: float) -> T:
    """Return the result of `action`, which is called up to `times` times while it raises one of `on`.

    Raises what the last call raises.
    """
    for _ in range(times - 1):
        try:
            return action()
        except on:
            time.sleep(pause_s)
    return action()
