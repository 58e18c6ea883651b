"""Parts of commands that follow something for a long time: notes on standard error, the end of their reader."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable

from trunkline_agent.terminal_text import escaped


class Notes:
    """A printer of notes on standard error. A note is a line that begins with the command's name."""

    def __init__(self, command: str) -> None:
        self._command = command

    def say(self, text: str) -> None:
        """Print one note on standard error. Characters that could control a terminal are escaped."""
        print(f"trunkline {self._command}: {escaped(text)}", file=sys.stderr, flush=True)

    def lost(self, what: str) -> Callable[[str | None], None]:
        """Return a function that prints a note when a connection is lost or is back.

        Call the returned function with the reason of the loss, or with None when there is a connection again.
        `what` is the name of the other side, such as "gateway".
        """

        def report(why: str | None) -> None:
            self.say(f"{what}: connected again" if why is None else f"{what}: {why}; trying again")

        return report


def refuse_without_reader() -> None:
    """Raise BrokenPipeError if the reader of our output has ended, though there is nothing to write."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    if any(events & select.POLLERR for _, events in watch.poll(0)):
        raise BrokenPipeError
