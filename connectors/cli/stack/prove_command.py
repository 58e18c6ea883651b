"""Test the backbone's guarantees: run seeds of faults under load, and report each violation.

A seed is a backbone of its own (real processes) under load at all doors, with some faults drawn from the seed
(kills, also at named points of the code, stops, full disks, cut and slow connections, duplicate processes,
wrong clocks). Then all acknowledged events are compared with ledger, views and live view. The same seed gives
the same schedule.

  ./trunkline prove --seeds 3                   a few minutes; a seed takes at most 100 s of an idle machine
  ./trunkline prove --seeds 100                 goes on where an earlier run has ended
  ./trunkline prove --seeds 1 --first-seed 42   one seed

Results are appended to a file, a line a seed; a seed in the file is not run again (--results names another
file). A seed with a finding keeps its data and prints where. The command needs the tests of the checkout, and
all that `./trunkline test` needs. It does not touch a stack that runs. Exit codes: 0, no finding; 1, a finding,
or a hundred seeds that did not meet each fault.
"""

from __future__ import annotations

import os
import subprocess
import sys

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import path
from connectors.cli.shared.call import Call
from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.errors import NotFound, UsageError

_MODULE = "tests.faults.prove.prove_faults"


ARGUMENTS = (
    argument("--seeds", "how many seeds (default: 1)", type=int, default=1, metavar="N"),
    argument("--first-seed", "the first of them (default: 0)", type=int, default=0, metavar="K"),
    path("--results", "where results are kept (default: var/prove.jsonl)", "FILE"),
    flag("--json", "print the sum of the results as one JSON object"),
)


def run(call: Call) -> int:
    """Run `trunkline prove`: test all seeds in a child process, and return the exit code of the child process.

    Raises UsageError for wrong numbers, and NotFound if the tests are not installed.
    """
    if call.seeds < 1 or call.first_seed < 0:
        raise UsageError("--seeds is 1 or more, --first-seed 0 or more")
    if not (PROJECT_ROOT / _MODULE.replace(".", "/")).with_suffix(".py").exists():
        raise NotFound("the tests are not part of this checkout, and the faults are among them")
    # Each seed has settings of its own.
    command = [sys.executable, "-P", "-m", _MODULE, "--seeds", str(call.seeds)]
    command += ["--first-seed", str(call.first_seed)]
    if call.results is not None:
        command += ["--results", str(call.results.absolute())]
    if call.json:
        command.append("--json")
    child = subprocess.Popen(  # noqa: S603 ours
        command, cwd=PROJECT_ROOT, env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)}
    )
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # The child gets the Ctrl-C as well, and ends in order.
