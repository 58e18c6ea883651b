"""Becomes a launched agent: waits until it is let go, hardens itself if it is told to, and runs the command.

`connectors.launcher.local_processes` starts it as `python -I -S hardening.py` in the agent's folder, with the
agent's environment and one variable more, the order. It imports the standard library alone, because it is
started for each agent and must not be led astray by what is in that environment.

It reads the handle that the launcher has noted from a socket, and ends without running anything when the
launcher ends before. The socket closes when the command runs, or when this has failed: then the reason is
the last line on standard error, and the exit code is 125 (not let go), 126 (not hardened) or 127 (not run).
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
# In the environment of the agent and of all that it starts: whose they are.
HANDLE_VARIABLE: Final = "TRUNKLINE_AGENT_HANDLE"
EXIT_NOT_LET_GO: Final = 125
EXIT_NOT_HARDENED: Final = 126
EXIT_NOT_RUN: Final = 127
PR_SET_NO_NEW_PRIVS: Final = 38
PR_GET_NO_NEW_PRIVS: Final = 39
_HANDLE_BYTES: Final = 256


def main() -> int:
    """Run the command in place of this program; returns an exit code only when that fails."""
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
    """Take the limits, by their names in `resource`, and give up new privileges, for good.

    Raises OSError or ValueError when one of it cannot be done.
    """
    for name, wanted in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        # One that is lower already stays.
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(number, (value, value))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise OSError(ctypes.get_errno(), "no_new_privs: " + os.strerror(ctypes.get_errno()))


def _handle(number: int) -> str:
    """What the launcher says; empty when it says nothing more. The socket stays open until the command runs."""
    os.set_inheritable(number, False)
    said = socket.socket(fileno=number)
    try:
        return said.recv(_HANDLE_BYTES).decode("ascii")
    except OSError:
        return ""
    finally:
        said.detach()


def _restore_signals() -> None:
    """Python ignores two of these, and whoever started us may have ignored others; the command would, too."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):  # the C library keeps two for itself
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _failed(code: int, why: str) -> int:
    print(why, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
