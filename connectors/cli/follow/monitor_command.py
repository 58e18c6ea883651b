"""Follows all jobs and sessions, and finds drift: rows of the two registries that contradict each other.

  trunkline monitor                 a live table on a terminal, else a line for each change
  trunkline monitor --mend          also repairs the drift that it finds
  trunkline monitor --once --json   the current state, one JSON object a line, and end

Drift is: a job that runs in a session that has ended (terminated, or its process is dead on this machine); a
session that was made for a job which has ended; a session that runs, but its process is dead on this machine.
Usually the reactor closes the session of a job that has ended within a moment; monitor shows it. --mend cancels
such a job and terminates such a session: for good, it cannot be resumed.

Also drift, but never repaired: a job that runs in a stopped session, which is kept for a resume; a session that
runs and still has a job which has ended, but was not made for it.

Exit codes: with --once 0, or 1 when there is drift that was not repaired; 4 refused; 5 the gateway does not
answer; 130 after Ctrl-C.
"""

from __future__ import annotations

from connectors.cli.shared.actions import flag
from connectors.cli.shared.call import Call

ARGUMENTS = (
    flag("--once", "show the current state, and end"),
    flag("--mend", "cancel the job, terminate the session"),
    flag("--json", "one JSON object a line"),
)


def run(call: Call) -> int:
    """Run `trunkline monitor`. Without `--once` it runs until Ctrl-C.

    With `--once` it returns the exit code: 1 if there is drift that was not repaired, else 0. Raises
    TrunklineError if the gateway does not answer at the start or refuses the token.
    """
    from connectors.cli.follow.monitor_loop import monitor

    return monitor(call.settings, once=call.once, mend=call.mend, as_json=call.json)
