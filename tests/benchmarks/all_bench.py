"""Every benchmark that has limits, one after the other, and one table of the limits held and not held.

It takes some hours on a quiet machine. A row is printed as soon as its benchmark has ended, and a benchmark
that fails is a row, too. Names choose benchmarks; `--against COMMIT` adds those that compare with another
commit. The JSON line has the figures of all (`runs`). The exit code is 1 if a limit was not held or a benchmark
failed.

    ./trunkline bench all --json
    ./trunkline bench all hub mcp wake --against HEAD~1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.bench_report import Figures, report

# The name of a benchmark, and the options with which its limits count.
RUNS: Final = (
    ("hub",),
    ("hub", "--through", "library"),
    ("mcp",),
    ("mcp", "--through", "library"),
    ("wake",),
    ("pump",),
    ("drain",),
    ("freshness",),
    ("freshness", "--through", "library"),
    ("freshness_store",),
    ("topics",),
    ("flood",),
    ("connection_flood",),
    ("slow_streams",),
    ("mailbox_depth",),
    ("long_lives",),
    ("warm_start",),
    ("growth", "--rates", "", "--no-doors", "--jobs", "1000,1000000"),
    ("agent_wheel",),
    ("endurance",),
)
AGAINST: Final = ("hub", "mcp", "wake", "inbox")
_FOLDER: Final = Path(__file__).parent


def runs_of(names: list[str], against: str | None) -> list[tuple[str, ...]]:
    """Return the benchmarks to run with their options, those of `names` only if there are names."""
    runs: list[tuple[str, ...]] = list(RUNS)
    if against is not None:
        runs += [(name, "--against", against) for name in AGAINST]
    return [run for run in runs if not names or run[0] in names]


def one_run(name: str, *options: str) -> Figures:
    """Run a benchmark, and return its result. One that fails has `errors`."""
    suffixed = _FOLDER / f"{name}_bench.py"
    path = suffixed if suffixed.exists() else _FOLDER / f"{name}.py"
    done = subprocess.run([sys.executable, str(path), "--json", *options], stdout=subprocess.PIPE, text=True)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"errors": [f"it ended with exit code {done.returncode} and without a result"]}


def rows_of(figures: Figures) -> list[tuple[str, str]]:
    """Return the rows of a benchmark: whether a limit is held, and the limit with the figure."""
    kinds = (("held", "held"), ("not_held", "NOT HELD"), ("errors", "ERROR"))
    return [(word, str(line)) for kind, word in kinds for line in figures.get(kind, ())]


def main() -> int:
    """Run the benchmarks; `--json` prints the result as one line."""
    parser = argparse.ArgumentParser(
        prog="trunkline bench all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="a benchmark to run (default: each)")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, too")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    args = parser.parse_args()
    found: dict[str, Any] = {"held": [], "not_held": [], "errors": [], "runs": {}}
    for run in runs_of(args.names, args.against):
        command, began = " ".join(run), time.monotonic()
        figures = one_run(*run)
        found["runs"][command] = {**figures, "took_s": round(time.monotonic() - began)}
        for kind in ("held", "not_held", "errors"):
            found[kind] += [f"{command}: {line}" for line in figures.get(kind, ())]
        for word, line in rows_of(figures):
            print(f"{word:<9} {command:<26} {line}", file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        return report(found, as_json=True)
    print(f"{len(found['held'])} held, {len(found['not_held'])} not held, {len(found['errors'])} errors")
    return 1 if found["not_held"] or found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
