"""Run a benchmark of `tests/benchmarks`, with the arguments that follow its name.

Without a name, list the benchmarks. `trunkline bench NAME --help` shows a benchmark's own arguments.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys

from connectors.cli.shared.actions import argument
from connectors.cli.shared.call import Call
from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.errors import NotFound

_FOLDER = PROJECT_ROOT / "tests" / "benchmarks"
_SUFFIX = "_bench"


def benchmarks() -> dict[str, str]:
    """Return the names of the benchmarks in tests/benchmarks, each with the first line of its docstring.

    `pump_bench.py` is named `pump`, so that no file has the name of another module.
    """
    found = {}
    for path in sorted(_FOLDER.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        # Others are peers and controls, which the benchmarks start.
        if "trunkline bench" in source and "__main__" in source:
            text = ast.get_docstring(ast.parse(source)) or ""
            found[path.stem.removesuffix(_SUFFIX)] = text.partition("\n")[0]
    return found


ARGUMENTS = (
    argument("name", "the benchmark", nargs="?", metavar="name"),
    argument("rest", "its own arguments", nargs=argparse.REMAINDER, metavar="rest"),
)


def run(call: Call) -> int:
    """Run the named benchmark in a child process and return the exit code of the child process.

    Without a name, it prints the names of all benchmarks and returns 0. Raises NotFound for an unknown name.
    """
    known = benchmarks()
    if call.name is None:
        for name, summary in known.items():
            print(f"  {name:<17}{summary}")
        if not known:
            print(f"no benchmarks in {_FOLDER}")
        return 0
    if call.name not in known:
        raise NotFound(f"no benchmark '{call.name}'; there are: {', '.join(known) or 'none'}")
    suffixed = _FOLDER / f"{call.name}{_SUFFIX}.py"
    path = suffixed if suffixed.exists() else _FOLDER / f"{call.name}.py"
    # The benchmark reads the settings itself, from the same environment.
    return subprocess.run([sys.executable, str(path), *call.rest]).returncode  # noqa: S603 ours
