"""The process behind `trunkline up`: starts the stack, looks after it, stops it in order on SIGTERM.

Run as `python -m connectors.local_stack.supervisor kafka mosquitto …`; the settings come from the environment.
It tells how far it is in the state file, and leaves there why it failed.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from types import FrameType

from connectors.local_stack import state_file
from connectors.local_stack.part_requests import take_requests
from connectors.local_stack.stack import LocalStack, StackRuns
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings, load_settings

_TICK_S = 0.2
# The exit code when another process runs a stack with this data directory.
ANOTHER_RUNS = 75


class _StopRequest:
    """Remembers that a signal asked for the end."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._remember)

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def __call__(self) -> bool:
        return self.asked


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
    """Add the parts that `trunkline up` has asked for since."""
    names = take_requests(settings)
    if not names:
        return
    try:
        stack.add(names)
    except TrunklineError as error:
        print(f"parts {', '.join(sorted(names))} are not added: {error}", flush=True)


def supervise(settings: Settings, parts: list[str]) -> int:
    """Run the stack until a signal asks for the end. Returns ANOTHER_RUNS where another process runs it."""
    should_stop = _StopRequest()
    stack: LocalStack | None = None
    try:
        stack = LocalStack(settings, parts, detached=True)
        stack.begin()
        take_requests(settings)
        while not should_stop():
            _add_requested(stack, settings)
            stack.look_after()
            stack.keep_bounded(settings.data_path / "logs" / "supervisor.log")
            time.sleep(_TICK_S)
    except StackRuns:
        # State file and log are the other one's: leave them alone.
        return ANOTHER_RUNS
    except TrunklineError as error:
        print(error, file=sys.stderr)
        _record_failure(settings, error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 reported to the process that waits for us, whatever it is
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
