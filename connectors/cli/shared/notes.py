"""Notes on standard error, for commands that follow something for a long time."""

from __future__ import annotations

import sys
from collections.abc import Callable

from connectors.terminal.terminal_text import escaped


class Notes:
    """Prints notes under a command's name, escaped."""

    def __init__(self, command: str) -> None:
        self._command = command

    def say(self, text: str) -> None:
        """Print a note."""
        print(f"trunkline {self._command}: {escaped(text)}", file=sys.stderr, flush=True)

    def lost(self, what: str) -> Callable[[str | None], None]:
        """Return a function for the state of a connection: why it was lost, or None once it is back."""

        def report(why: str | None) -> None:
            self.say(f"{what}: connected again" if why is None else f"{what}: {why}; trying again")

        return report
