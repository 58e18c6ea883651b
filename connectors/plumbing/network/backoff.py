"""Pauses between attempts that grow, and a function that repeats a call a fixed number of times."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Final, TypeVar

T = TypeVar("T")

_LOG_AGAIN_S: Final = 60.0


class Backoff:
    """Growing pauses between attempts: `first_s` seconds, then twice as long each time, up to `most_s`.

    The object does not wait itself. Not thread-safe: one thread makes the attempts.
    """

    def __init__(self, first_s: float = 0.1, most_s: float = 1.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._pause_s = first_s
        self._logged, self._logged_at = "", -inf

    def reset(self) -> None:
        """Begin with the shortest pause again. Call it after an attempt that succeeded."""
        self._pause_s = self._first_s

    def next_s(self) -> float:
        """Return for how many seconds to wait before the next attempt.

        Each call returns twice as much as the one before, up to `most_s`.
        """
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._most_s)
        return pause_s

    def is_to_log(self, reason: str) -> bool:
        """Return whether to log `reason`, a text that says why an attempt has failed.

        The result is True for a text that differs from the last logged one, and once a minute for the same
        text. True counts as logged.
        """
        if reason == self._logged and time.monotonic() - self._logged_at <= _LOG_AGAIN_S:
            return False
        self._logged, self._logged_at = reason, time.monotonic()
        return True


def retry(action: Callable[[], T], on: tuple[type[Exception], ...], times: int, pause_s: float) -> T:
    """Call `action` until it succeeds, and return its result. Block during the calls and the pauses.

    Args:
        action: The call to repeat.
        on: The exceptions after which it is called again. Others are raised at once.
        times: Call it at most this many times. The exception of the last call is raised.
        pause_s: The pause between two calls, in seconds.
    """
    for _ in range(times - 1):
        try:
            return action()
        except on:
            time.sleep(pause_s)
    return action()
