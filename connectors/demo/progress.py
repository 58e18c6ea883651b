"""Shows on standard error what the demo is doing, how far it is and how long each step took."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_LINE_EVERY_S = 5.0
_REWRITE = "\r\033[K"


class Progress:
    """Numbered steps. On a terminal the current one is rewritten in place; else a line now and then."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._steps = steps
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._number = 0
        self._text = ""
        self._started = self._last_line = time.monotonic()

    def begin(self, text: str) -> None:
        """The next step."""
        self._number += 1
        self._text = text
        self._started = self._last_line = time.monotonic()
        self._write(f"{self._head()} ...", live=True)

    def tell(self, how_far: str) -> None:
        """How far the current step is."""
        line = f"{self._head()}: {how_far} ({self._seconds():.0f} s)"
        if self._live:
            self._write(line, live=True)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._write(line)

    def done(self, result: str) -> None:
        """The current step is over."""
        self._write(f"{self._head()}: {result} ({self._seconds():.1f} s)")

    def say(self, line: str) -> None:
        """A line of its own."""
        self._write(line)

    def _head(self) -> str:
        return f"[{self._number}/{self._steps}] {self._text}"

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _write(self, line: str, *, live: bool = False) -> None:
        if not self._live:
            print(line, file=self._stream, flush=True)
        elif live:
            width = shutil.get_terminal_size().columns - 1
            print(f"{_REWRITE}{line[:width]}", end="", file=self._stream, flush=True)
        else:
            print(f"{_REWRITE}{line}", file=self._stream, flush=True)
