"""The program that turns into a launched agent: waits for the launcher, applies limits, runs the command.

`connectors.hub.launcher.local_processes` starts this file as `python -I -S hardening.py` in the agent's folder.
The environment is the agent's, with the order in one more variable. The file imports only the standard library:
it runs for each agent, and nothing in that environment may change which modules it loads.

The program reads the handle of the run from a socket. If the launcher ends before it sends the handle,
nothing is run. The socket closes when the command runs or has failed to. After a failure the last line on
standard error says why, and the exit code is 125 (not let go), 126 (not hardened) or 127 (not run).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Final

ORDER_VARIABLE: Final = "TRUNKLINE_LAUNCH_ORDER"
# Marks the agent and all that it starts, by the handle of the run.
HANDLE_VARIABLE: Final = "TRUNKLINE_AGENT_HANDLE"
EXIT_NOT_LET_GO: Final = 125
EXIT_NOT_HARDENED: Final = 126
EXIT_NOT_RUN: Final = 127
PR_SET_NO_NEW_PRIVS: Final = 38
PR_GET_NO_NEW_PRIVS: Final = 39
_HANDLE_BYTES: Final = 256


def main() -> int:
    """Wait for the launcher's permission, and replace this process by the agent's command.

    The variable ORDER_VARIABLE has a JSON object with the command, the limits and the number of a socket. The
    launcher permits the start by sending the handle of the run to this socket. The function only returns if it
    fails: then it returns the exit code (125, 126 or 127), and the reason is on stderr.
    """
    order: dict[str, Any] = json.loads(os.environ.pop(ORDER_VARIABLE))
    handle = _handle(order["socket"])
    if not handle:
        return _failed(EXIT_NOT_LET_GO, "the launcher ended before the agent was let go")
    os.environ[HANDLE_VARIABLE] = handle
    try:
        if order["limits"] is not None:
            harden(order["limits"])
    except (OSError, ValueError, AttributeError) as error:
        return _failed(EXIT_NOT_HARDENED, f"cannot harden the agent: {error}")
    _restore_signals()
    program = order["command"][0]
    try:
        os.execvpe(program, order["command"], os.environ)  # noqa: S606  no shell is wanted
    except OSError as error:
        return _failed(EXIT_NOT_RUN, f"cannot run {program}: {error.strerror}")


def harden(limits: dict[str, int]) -> None:
    """Apply resource limits to this process, and forbid it to gain privileges, both for good.

    Privileges are forbidden by PR_SET_NO_NEW_PRIVS of prctl(2). Programs that this process runs inherit both.

    Args:
        limits: Values by names of the module `resource`, such as `RLIMIT_CPU`. A lower limit that is set
            already stays.

    Raises:
        OSError: The kernel refused a limit or prctl. An invalid value raises ValueError.
    """
    for name, wanted in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        # A hard limit that is lower already stays.
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(number, (value, value))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise OSError(ctypes.get_errno(), "no_new_privs: " + os.strerror(ctypes.get_errno()))


def _handle(number: int) -> str:
    """Return the handle from the launcher, empty if the launcher has ended.

    The socket stays open until the command runs.
    """
    os.set_inheritable(number, False)
    gate = socket.socket(fileno=number)
    try:
        return gate.recv(_HANDLE_BYTES).decode("ascii")
    except OSError:
        return ""
    finally:
        gate.detach()


def _restore_signals() -> None:
    """Restore the default signal handlers.

    Python ignores two signals, and the program that started this one may have ignored others. The command would
    inherit that.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):  # the C library keeps two for itself
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _failed(code: int, why: str) -> int:
    print(why, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
