"""A bound on how often a program logs the same: one line of a kind every few seconds, with the number of those
that were left out.

Strangers can cause some lines as often as they like (a request that is no HTTP, a connection beyond a budget).
Without a bound they could rotate everything else out of the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

EVERY_S: Final = 5.0
_KINDS: Final = 256
_TEXT: Final = 80


@dataclass
class _Kind:
    logged_at: float
    omitted: int = 0


class LogLimit:
    """Decides which lines are logged. Thread-safe. `clock` returns seconds and never goes back."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def omitted(self, kind: Hashable) -> int | None:
        """Return how many lines of this kind were left out since the last one, None to leave out this one."""
        now = self._clock()
        with self._lock:
            known = self._kinds.get(kind)
            if known is not None and now - known.logged_at < self._every_s:
                known.omitted += 1
                return None
            self._kinds[kind] = _Kind(now)
            self._kinds.move_to_end(kind)
            if len(self._kinds) > _KINDS:
                self._kinds.popitem(last=False)
            return 0 if known is None else known.omitted


class RepeatedLines(logging.Filter):
    """Leaves out what libraries log again and again. The next line of the kind that passes has `omitted`.

    A kind is a logger, a level, the error's type, and the first line of the message without its arguments.
    """

    def __init__(self, limit: LogLimit | None = None) -> None:
        super().__init__()
        self._limit = limit or LogLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged."""
        error = record.exc_info[0] if record.exc_info else None
        text = str(record.msg).partition("\n")[0][:_TEXT]
        omitted = self._limit.omitted((record.name, record.levelno, error, text))
        if omitted:
            record.omitted = omitted
        return omitted is not None
