"""The frame of a benchmark: options, folder, progress on stderr, result and exceeded limits on stdout."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

_Figures = TypeVar("_Figures")


def teller(bench: str) -> Callable[[str], None]:
    """Tells progress, on stderr: stdout is for the result."""

    def say(text: str) -> None:
        print(f"{bench}: {text}", file=sys.stderr, flush=True)

    return say


def quantile(values: Iterable[float], share: float) -> float:
    """One quantile."""
    found = sorted(values)
    return found[min(len(found) - 1, int(len(found) * share))]


def medians(rounds: Sequence[_Figures]) -> _Figures:
    """The medians of rounds, which are dataclass objects, figure by figure."""
    kind: Any = type(rounds[0])
    return kind(**{  # type: ignore[no-any-return]
        name: statistics.median(getattr(one, name) for one in rounds) for name in kind.__dataclass_fields__
    })  # fmt: skip


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
            result = {**result, "not_held": not_held(result, *bounds)}
        return report(result, as_json=args.json)
