"""Stop the local stack: bridges, pump, gateway, streaming jobs, Mosquitto, Kafka, in this order.

No part of the stack and no agent of a task is left running, even if the supervisor itself was killed. The data
stays. Sessions of agents (`sessions create`, `jobs submit`) outlive the stack: the command lists the sessions
that run on this machine, and `--sessions` ends them.
"""

from __future__ import annotations

import argparse
import time

from connectors.local_stack import control
from connectors.processes.session_host import GRACE_S, SessionHost
from schemas.settings.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--sessions", action="store_true", help="end the sessions of agents on this machine, too"
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Stop the stack. A stack that does not run is no error."""
    started = time.monotonic()
    if control.stop_detached(settings, lambda _state: None):
        print(f"Stopped after {time.monotonic() - started:.1f} s.")
    else:
        print(f"No part of a stack runs (data_dir {settings.data_path}).")
    host = SessionHost(settings)
    for handle, session in sorted(host.running().items(), key=lambda run: run[1]):
        if args.sessions:
            host.stop(handle, grace_s=GRACE_S)
            print(f"Session {session} is ended ({handle}).")
        else:
            print(f"Session {session} goes on ({handle}); to end all of them: trunkline down --sessions")
    return 0
