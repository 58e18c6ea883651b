"""Stop the local stack: bridges, pump, gateway, streaming jobs, Mosquitto, Kafka, in this order.

No part of the stack and no agent of a task is left running, even if the supervisor itself was killed. The data
stays. Sessions of agents (`sessions create`, `jobs submit`) outlive the stack: the command lists the sessions
that run on this machine, and `--sessions` ends them.
"""

from __future__ import annotations

import time

from connectors.cli.shared.actions import flag
from connectors.cli.shared.call import Call
from connectors.programs.local_stack import control
from connectors.programs.processes.session_host import GRACE_S, SessionHost

ARGUMENTS = (flag("--sessions", "end the sessions of agents on this machine, too"),)


def run(call: Call) -> int:
    """Stop the local stack, with `--sessions` also all sessions of this machine, and return 0.

    A stack that does not run is no error.
    """
    started = time.monotonic()
    if control.stop_detached(call.settings, lambda _state: None):
        print(f"Stopped after {time.monotonic() - started:.1f} s.")
    else:
        print(f"No part of a stack runs (data_dir {call.settings.data_path}).")
    host = SessionHost(call.settings)
    for handle, session in sorted(host.running().items(), key=lambda run: run[1]):
        if call.sessions:
            host.stop(handle, grace_s=GRACE_S)
            print(f"Session {session} is ended ({handle}).")
        else:
            print(f"Session {session} goes on ({handle}); to end all of them: trunkline down --sessions")
    return 0
