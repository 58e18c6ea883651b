"""Aligned tables of text for people; whatever an agent wrote stands there escaped. And lengths of time."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from connectors.terminal.terminal_text import escaped

_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_CELL_LIMIT: Final = 60
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)").fullmatch


def aligned(heading: Sequence[str], rows: Sequence[Sequence[object]], cell_limit: int = _CELL_LIMIT) -> str:
    """Return a heading and rows in columns. None is shown as `-`; a longer cell than `cell_limit` is cut."""
    lines = [list(heading), *([_cell(value, cell_limit) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    texts = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def fields(row: dict[str, Any]) -> str:
    """One line a field, its name before it, for a row of a view."""
    width = max((len(name) for name in row), default=0)
    return "\n".join(f"{name:<{width}}  {_whole(value)}" for name, value in row.items())


def duration_s(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `2h`, `1d`; a type for argparse."""
    found = _DURATION(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30s, 5m, 2h or 1d, found {text!r}")
    return float(found[1]) * _UNITS_S[found[2]]


def age_of(moment: object, now: datetime | None = None) -> str:
    """How long ago an ISO 8601 time was, in its largest unit; `-` for none."""
    if not isinstance(moment, str):
        return "-"
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return escaped(moment)
    seconds = max(0, int(((now or datetime.now(UTC)) - then).total_seconds()))
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS_S[unit]:
            return f"{seconds // _UNITS_S[unit]}{unit}"
    return f"{seconds}s"


def _cell(value: object, limit: int) -> str:
    text = _whole(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _whole(value: object) -> str:
    return "-" if value is None else escaped(str(value))


def print_json(found: object) -> None:
    """One JSON object on one line, ASCII only: bidirectional marks and the like are not obeyed either."""
    print(json.dumps(found, separators=(",", ":")))
