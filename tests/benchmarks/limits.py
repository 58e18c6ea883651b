"""What the figures of a benchmark have to hold: said beside them, and by the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def not_held(
    figures: Mapping[str, Any], at_most: Mapping[str, float], at_least: Mapping[str, float] | None = None
) -> list[str]:
    """A line for each limit that is not held; a figure that is missing holds none."""
    bounds = [(name, "at most", limit) for name, limit in at_most.items()]
    bounds += [(name, "at least", limit) for name, limit in (at_least or {}).items()]
    found = []
    for name, word, limit in bounds:
        value = figures.get(name)
        if value is None or (value > limit if word == "at most" else value < limit):
            found.append(f"{name} is {value}, {word} {limit}")
    return found
