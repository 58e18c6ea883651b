"""The program behind `trunkline up`: it starts the stack, supervises it, and stops it in order on SIGTERM.

Run it as `python -m connectors.programs.local_stack.supervisor kafka mosquitto …`; the settings come from the
environment. It writes its progress, and the reason of a failure, to the state file.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback

from connectors.plumbing.machine import state_file
from connectors.programs.local_stack.stack import LocalStack, StackRuns
from schemas.settings.settings import Settings, load_settings
from trunkline_agent.errors import TrunklineError

_TICK_S = 0.2
# The exit code when another process runs a stack with this data directory.
ANOTHER_RUNS = 75


def _record_failure(settings: Settings, error: BaseException) -> None:
    state = {
        "phase": state_file.FAILED,
        "supervisor": state_file.identity(),
        "detached": True,
        "error": str(error),
        "names": [],
        "settings": {},
        "parts": {},
    }
    state_file.write_state(settings, state)


def _add_requested(stack: LocalStack, settings: Settings) -> None:
    """Add the parts that `trunkline up` has requested."""
    names = state_file.take_requests(settings)
    if not names:
        return
    try:
        stack.add(names)
    except TrunklineError as error:
        print(f"cannot add {', '.join(sorted(names))}: {error}", flush=True)


def supervise(settings: Settings, parts: list[str]) -> int:
    """Run these parts of the stack until a signal asks for the end, then stop them, and return the exit code.

    The signals are SIGTERM, SIGINT and SIGHUP. Progress and failures are written to the state file. `parts` are
    names of parts, such as `kafka`.

    Returns:
        0 after a signal, ANOTHER_RUNS when another process runs a stack with this data directory, else the code
        of the error.
    """
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # No lock: another signal may interrupt the handler.
        signal.signal(number, lambda number, _: signals.append(number))
    stack: LocalStack | None = None
    try:
        stack = LocalStack(settings, parts, detached=True)
        stack.begin()
        state_file.take_requests(settings)
        while not signals:
            _add_requested(stack, settings)
            stack.look_after()
            stack.keep_bounded(settings.data_path / "logs" / "supervisor.log")
            time.sleep(_TICK_S)
    except StackRuns:
        # State file and log belong to the other process.
        return ANOTHER_RUNS
    except TrunklineError as error:
        print(error, file=sys.stderr)
        _record_failure(settings, error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 any error is reported to the process that waits
        traceback.print_exc()
        if stack is not None:
            stack.stop()
        _record_failure(settings, error)
        return 1
    finally:
        if stack is not None:
            stack.stop()
    return 0


if __name__ == "__main__":
    sys.exit(supervise(load_settings(), sys.argv[1:]))
