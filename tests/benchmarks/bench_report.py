"""The frame of a benchmark: options, folder, progress on stderr, result and exceeded limits on stdout."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

LOAD: Final = "load"
"""This program, among those whose processor time is measured."""
Figures = dict[str, Any]
"""The figures of a round: numbers, or further figures by name, such as those of each process."""


def teller(bench: str) -> Callable[[str], None]:
    """Tells progress, on stderr: stdout is for the result."""

    def say(text: str) -> None:
        print(f"{bench}: {text}", file=sys.stderr, flush=True)

    return say


def quantile(values: Iterable[float], share: float) -> float:
    """One quantile."""
    found = sorted(values)
    return found[min(len(found) - 1, int(len(found) * share))]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the medians of rounds, figure by figure, with four digits, of the names that each round has."""
    found: Figures = {}
    for name, first in rounds[0].items():
        values = [one[name] for one in rounds if name in one]
        if len(values) == len(rounds):
            found[name] = medians(values) if isinstance(first, dict) else digits(statistics.median(values))
    return found


def digits(value: float) -> float:
    """Return a number with the four digits that a measured one has."""
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short


def in_turns(
    rounds: int, sides: Mapping[str, Callable[[], Figures]], say: Callable[[str], None]
) -> dict[str, list[Figures]]:
    """Measure each side once in each round, and return the figures of all rounds by side.

    Every second round begins with the last side, so that a trend of the machine hits all sides. A finished
    round is reported at once: no later failure takes its figures away.
    """
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    for number in range(1, rounds + 1):
        order = list(sides)
        for name in order if number % 2 else reversed(order):
            found[name].append(sides[name]())
            say(f"{name}, round {number}: {json.dumps(medians(found[name][-1:]))}")
    return found


def prefixed(prefix: str, figures: Figures) -> Figures:
    """Return figures with a prefix to each name."""
    return {f"{prefix}_{name}": value for name, value in figures.items()}


def ratios(figures: Figures, pairs: Mapping[str, tuple[str, str]]) -> Figures:
    """Return ratios by name, each of two figures; the one of a missing figure is left out.

    A figure by process, such as `us_per_op`, counts with the sum of its processes, without the load's.
    """
    found: Figures = {}
    for name, (above, below) in pairs.items():
        if above in figures and below in figures:
            values = [figures[one] for one in (above, below)]
            first, second = (
                sum(us for process, us in one.items() if process != LOAD) if isinstance(one, dict) else one
                for one in values
            )
            found[name] = digits(first / second) if second else None
    return found


def add_phase(figures: Figures, measure: Callable[[], Figures]) -> None:
    """Add the figures of one phase. Its failure becomes one of `errors`, and takes no other figures away."""
    try:
        figures |= measure()
    except Exception as error:
        traceback.print_exc()
        figures.setdefault("errors", []).append(f"{type(error).__name__}: {error}")


def judged(
    figures: Mapping[str, Any], at_most: Mapping[str, float], at_least: Mapping[str, float] | None = None
) -> dict[str, list[str]]:
    """Return `held` and `not_held`, with a line for each limit. A missing figure does not hold its limit."""
    bounds = [(name, "at most", limit) for name, limit in at_most.items()]
    bounds += [(name, "at least", limit) for name, limit in (at_least or {}).items()]
    found: dict[str, list[str]] = {"held": [], "not_held": []}
    for name, word, limit in bounds:
        value = figures.get(name)
        is_held = value is not None and (value <= limit if word == "at most" else value >= limit)
        found["held" if is_held else "not_held"].append(f"{name} is {value}, {word} {limit}")
    return found


def not_held(
    figures: Mapping[str, Any], at_most: Mapping[str, float], at_least: Mapping[str, float] | None = None
) -> list[str]:
    """Return a line for each limit that is not held."""
    return judged(figures, at_most, at_least)["not_held"]


def is_as_stated(parser: argparse.ArgumentParser, args: argparse.Namespace, free: Iterable[str] = ()) -> bool:
    """True if every option but `--json` and those of `free` has its default. The limits are for these alone."""
    others = {"json", *free}
    return all(parser.get_default(name) == value for name, value in vars(args).items() if name not in others)


def report(result: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the result, in one line `as_json`. Returns the exit code: 1 where `not_held` or `errors` says
    something.
    """
    print(json.dumps(result, indent=None if as_json else 2))
    return 1 if result.get("not_held") or result.get("errors") else 0


def numbers(text: str) -> list[int]:
    """A list such as `50,200`."""
    return [int(part) for part in text.split(",") if part]


class Bench(argparse.ArgumentParser):
    """The program of one benchmark. It has the option `--json`; the others are added to it as to any parser.

    Args:
        name: The word behind `trunkline bench`.
        about: The docstring of its module, for `--help`.
        at_most: Limits of figures, which count for a run with the default options only.
        at_least: Limits in the other direction.
        needs: For a limit, the option without which it does not count. With this option the other limits count,
            too.
    """

    def __init__(
        self,
        name: str,
        about: str | None,
        at_most: Mapping[str, float] | None = None,
        at_least: Mapping[str, float] | None = None,
        needs: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            prog=f"trunkline bench {name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._name, self._at_most, self._at_least = name, at_most or {}, at_least or {}
        self._needs = needs or {}
        self.add_argument("--json", action="store_true", help="print one JSON line and nothing else")

    def run(self, measure: Callable[[argparse.Namespace, Path], Mapping[str, Any] | None]) -> int:
        """Call `measure` with the options and a folder of its own, and report the result.

        Nothing is reported for None: such a benchmark has printed its results. Returns the exit code.
        """
        args = self.parse_args()
        with tempfile.TemporaryDirectory(prefix=f"trunkline-{self._name}-") as work:
            result = measure(args, Path(work))
        if result is None:
            return 0
        if (self._at_most or self._at_least) and is_as_stated(self, args, self._needs.values()):
            left_out = {limit for limit, option in self._needs.items() if getattr(args, option) is None}
            bounds = (
                {name: bound for name, bound in bounds.items() if name not in left_out}
                for bounds in (self._at_most, self._at_least)
            )
            result = {**result, **judged(result, *bounds)}
        return report(result, as_json=args.json)
