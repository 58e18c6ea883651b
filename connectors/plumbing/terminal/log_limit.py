"""Limit how often a program logs the same kind of line, and count the lines that were left out.

Any client can cause some lines as often as it likes (a request that is not HTTP, a connection beyond a budget).
Without a limit these lines could push everything else out of the log. The number of kinds is limited, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

EVERY_S: Final = 5.0
_KINDS: Final = 256
_TEXT: Final = 80

_LineKind = TypeVar("_LineKind", bound=Hashable)


@dataclass
class _Kind:
    logged_at: float
    omitted: int = 0


class LogLimit(Generic[_LineKind]):
    """A limit for log lines, so that one kind of line cannot fill the log. Thread-safe.

    It writes nothing itself. Call `omitted` before each line.

    Args:
        every_s: the time from one line of a kind to the next, in seconds.
        clock: returns seconds and never goes back.
        most: the number of kinds within `every_s`. All further kinds count as one, `None`.
    """

    def __init__(
        self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic, most: int = _KINDS
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        # Sorted by the time of their last lines.
        self._kinds: OrderedDict[_LineKind | None, _Kind] = OrderedDict()

    def omitted(self, kind: _LineKind | None) -> int | None:
        """Decide whether to log a line of this kind now. None means: leave the line out.

        Args:
            kind: Any value that is equal for lines of the same kind.

        Returns:
            None: the caller must not log the line. Else the caller logs the line with this number: how many
            lines of the kind were left out since the last one, 0 or more. The number may be too low, because
            the count of a kind is lost when another kind needs its place. Regular calls of `due` prevent that.
        """
        now = self._clock()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= self._most - 1:
                oldest = next(iter(self._kinds))
                if now - self._kinds[oldest].logged_at < self._every_s:
                    kind = None
                else:
                    del self._kinds[oldest]
            known = self._kinds.get(kind)
            if known is not None and now - known.logged_at < self._every_s:
                known.omitted += 1
                return None
            self._note(kind, now)
            return 0 if known is None else known.omitted

    def due(self) -> list[tuple[_LineKind | None, int]]:
        """Return each kind whose lines were left out until `every_s` was over, with the number of these lines.

        The caller logs one line with the number for each kind. The next `every_s` of these kinds begin now. A
        program that calls this from time to time also reports lines after which none of their kind followed.
        """
        now, found = self._clock(), []
        with self._lock:
            for kind, known in list(self._kinds.items()):
                if now - known.logged_at < self._every_s:
                    break
                if known.omitted:
                    found.append((kind, known.omitted))
                    self._note(kind, now)
                else:
                    del self._kinds[kind]
        return found

    def _note(self, kind: _LineKind | None, now: float) -> None:
        self._kinds[kind] = _Kind(now)
        self._kinds.move_to_end(kind)


class RepeatedLines(logging.Filter):
    """A filter for `logging` that leaves out repeated lines of libraries.

    The next line of the kind has the field `omitted`: how many lines were left out. If none follows, the number
    is not logged. A kind is a logger, a level, the error's type, and the first line of the message without its
    arguments.
    """

    def __init__(self, limit: LogLimit[Hashable] | None = None) -> None:
        super().__init__()
        self._limit = limit or LogLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the line `record`.

        If earlier lines of its kind were left out, the record gets their number as attribute `omitted`.
        """
        error = record.exc_info[0] if record.exc_info else None
        text = str(record.msg).partition("\n")[0][:_TEXT]
        omitted = self._limit.omitted((record.name, record.levelno, error, text))
        if omitted:
            record.omitted = omitted
        return omitted is not None
