"""Run a benchmark of `tests/benchmarks`, with the arguments that follow its name.

Without a name, list the benchmarks. `trunkline bench NAME --help` shows a benchmark's own arguments.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from schemas.errors import NotFound
from schemas.settings.settings import PROJECT_ROOT, Settings

_FOLDER = PROJECT_ROOT / "tests" / "benchmarks"
_SUFFIX = "_bench"


def benchmarks(folder: Path = _FOLDER) -> dict[str, str]:
    """Return the programs in the folder, each with the first line of its docstring.

    `queue_bench.py` is named `queue`: a file `queue.py` would hide Python's own module.
    """
    found = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "__main__" in source and not path.stem.startswith("test_"):
            text = ast.get_docstring(ast.parse(source)) or ""
            found[path.stem.removesuffix(_SUFFIX)] = text.partition("\n")[0]
    return found


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", nargs="?", help="the benchmark")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its own arguments")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Run the benchmark as a program of its own, or list the benchmarks."""
    known = benchmarks()
    if args.name is None:
        for name, summary in known.items():
            print(f"  {name:<17}{summary}")
        if not known:
            print(f"no benchmarks in {_FOLDER}")
        return 0
    if args.name not in known:
        raise NotFound(f"no benchmark '{args.name}'; there are: {', '.join(known) or 'none'}")
    del settings  # The benchmark reads them itself, from the same environment.
    suffixed = _FOLDER / f"{args.name}{_SUFFIX}.py"
    path = suffixed if suffixed.exists() else _FOLDER / f"{args.name}.py"
    return subprocess.run([sys.executable, str(path), *args.rest]).returncode  # noqa: S603 ours
