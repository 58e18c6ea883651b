"""The demo's progress on standard error: its steps, and how long each took."""

from __future__ import annotations

import shutil
import sys
import time

_LINE_EVERY_S = 5.0
_REWRITE = "\r\033[K"


class Progress:
    """A display of numbered steps on standard error, with the time that each takes.

    A terminal shows the current step in place; a file gets a line at most every five seconds. `steps` is the
    number of all steps.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._live = sys.stderr.isatty()
        self._number = 0
        self._text = ""
        self._started = self._last_line = time.monotonic()

    def begin(self, text: str) -> None:
        """Print that the next step begins, with `text` as its title."""
        self._number += 1
        self._text = text
        self._started = self._last_line = time.monotonic()
        self.say(f"{self._head()} ...", live=True)

    def update(self, state: str) -> None:
        """Print `state` as the current state of the step. In a file, most updates are left out."""
        line = f"{self._head()}: {state} ({self._seconds():.0f} s)"
        if self._live:
            self.say(line, live=True)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(line)

    def done(self, result: str) -> None:
        """Print that the current step has ended, with the text `result` and the duration of the step."""
        self.say(f"{self._head()}: {result} ({self._seconds():.1f} s)")

    def _head(self) -> str:
        return f"[{self._number}/{self._steps}] {self._text}"

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, line: str, *, live: bool = False) -> None:
        """Print a line on standard error. On a terminal, the next line overwrites it if `live` is set."""
        if not self._live:
            print(line, file=sys.stderr, flush=True)
        elif live:
            width = shutil.get_terminal_size().columns - 1
            print(f"{_REWRITE}{line[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{_REWRITE}{line}", file=sys.stderr, flush=True)
