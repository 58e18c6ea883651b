"""Run one part of the stack in the foreground, until it gets SIGTERM or Ctrl-C.

For systemd, containers and other supervisors, which start the part again when it ends. Its log goes to standard
output, one JSON object a line. systemd learns when the part is ready and that it still answers (`Type=notify`,
`WatchdogSec`). Several parts can share a data directory; `up` runs them all with a supervisor of its own.

Exit code 0 after a signal; 1 when the part ended by itself or cannot start, and for `--health` when it does not
run, is not ready or does not answer; 4 when it runs already.
"""

from __future__ import annotations

import os

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.call import Call
from connectors.programs.local_stack import foreground
from connectors.programs.local_stack.part_plan import ALL_PARTS
from trunkline_agent.errors import UsageError

ARGUMENTS = (
    argument("part", f"one of {', '.join(ALL_PARTS)} (default: TRUNKLINE_PART)", metavar="part", nargs="?"),
    flag("--health", "run nothing; tell by the exit code whether the part that runs here is well"),
)


def run(call: Call) -> int:
    """Run the part until a signal, and return 0; with `--health` return 0 if it is well, else 1.

    Raises UsageError for an unknown part, and TrunklineError when it cannot start or has ended.
    """
    part = call.part or os.environ.get("TRUNKLINE_PART")
    if not part:
        raise UsageError(f"name the part, or set TRUNKLINE_PART: one of {', '.join(ALL_PARTS)}")
    if call.health:
        return 0 if foreground.is_healthy(call.settings, part) else 1
    return foreground.run_part(call.settings, part)
