"""The output of the benchmarks: progress on stderr; the result and the limits that it exceeds on stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def teller(bench: str) -> Callable[[str], None]:
    """Tells progress, on stderr: stdout is for the result."""

    def say(text: str) -> None:
        print(f"{bench}: {text}", file=sys.stderr, flush=True)

    return say


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


def is_as_stated(parser: argparse.ArgumentParser, args: argparse.Namespace) -> bool:
    """Whether nothing but `--json` was asked for otherwise than by default: what the limits are for."""
    return all(parser.get_default(name) == value for name, value in vars(args).items() if name != "json")


def report(result: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the result, in one line `as_json`. Returns the exit code: 1 where `not_held` or `errors` says
    something.
    """
    print(json.dumps(result, indent=None if as_json else 2))
    return 1 if result.get("not_held") or result.get("errors") else 0
