"""The demo's progress on standard error: its steps, and how long each took."""

from __future__ import annotations

import shutil
import sys
import time

_LINE_EVERY_S = 5.0
_REWRITE = "\r\033[K"


class Progress:
    """Numbered steps. A terminal shows the current one in place; a file gets a line every five seconds."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._live = sys.stderr.isatty()
        self._number = 0
        self._text = ""
        self._started = self._last_line = time.monotonic()

    def begin(self, text: str) -> None:
        """Start the next step."""
        self._number += 1
        self._text = text
        self._started = self._last_line = time.monotonic()
        self.say(f"{self._head()} ...", live=True)

    def update(self, state: str) -> None:
        """Show the state of the current step."""
        line = f"{self._head()}: {state} ({self._seconds():.0f} s)"
        if self._live:
            self.say(line, live=True)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(line)

    def done(self, result: str) -> None:
        """End the current step."""
        self.say(f"{self._head()}: {result} ({self._seconds():.1f} s)")

    def _head(self) -> str:
        return f"[{self._number}/{self._steps}] {self._text}"

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, line: str, *, live: bool = False) -> None:
        """Print a line; a `live` one is replaced by the next one on a terminal."""
        if not self._live:
            print(line, file=sys.stderr, flush=True)
        elif live:
            width = shutil.get_terminal_size().columns - 1
            print(f"{_REWRITE}{line[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{_REWRITE}{line}", file=sys.stderr, flush=True)
