"""Output for people: aligned tables, ages, and notes on standard error. Text of agents is shown escaped."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import UNIT_S

CELL_LIMIT: Final = 60


def aligned(heading: Sequence[str], rows: Sequence[Sequence[object]], cell_limit: int = CELL_LIMIT) -> str:
    """Return the text of a table with a heading, in aligned columns.

    None is shown as `-`, any other value as escaped text. A cell with more than `cell_limit` characters is cut.

    Args:
        heading: The headings of the columns.
        rows: The rows, each with one value for each column.
        cell_limit: The largest number of characters of a cell.
    """
    lines = [list(heading), *([_cell(value, cell_limit) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    texts = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def fields(row: dict[str, Any]) -> str:
    """Return a text with one line for each field of `row`: its name and its value, None as `-`."""
    width = max((len(name) for name in row), default=0)
    return "\n".join(f"{name:<{width}}  {_whole(value)}" for name, value in row.items())


def age_of(moment: object, now: datetime | None = None) -> str:
    """Return how long ago the ISO 8601 time `moment` was, in its largest unit, such as `3d` or `12s`.

    None gives `-`, and a text that is no time is returned escaped. `now` is the current time; None reads the
    clock.
    """
    if not isinstance(moment, str):
        return "-"
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return escaped(moment)
    seconds = max(0, int(((now or datetime.now(UTC)) - then).total_seconds()))
    for unit in ("d", "h", "m"):
        if seconds >= UNIT_S[unit]:
            return f"{seconds // UNIT_S[unit]}{unit}"
    return f"{seconds}s"


def _cell(value: object, limit: int) -> str:
    text = _whole(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _whole(value: object) -> str:
    return "-" if value is None else escaped(str(value))


def print_json(found: object) -> None:
    """Print one JSON object on one line, in ASCII, so that a terminal obeys none of its characters."""
    print(json.dumps(found, separators=(",", ":")))


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
