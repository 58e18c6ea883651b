"""The wrapper of a session's command: `python -m connectors.programs.processes.session_runner SPEC HANDLE`.

The wrapper reads the session's spec file, which has mode 0600, so that no argument contains a secret. It waits
until the file of `release_file` exists, and runs the command with the environment and instructions from the
spec. Then it writes the exit code to a file in the same folder. Only
`connectors.programs.processes.session_host` starts it, in a tmux pane or as the leader of its own process
session.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import IO, Final

import msgspec

from connectors.plumbing.machine.process_tree import PROCESS, process_handle
from trunkline_agent.private_files import PRIVATE_UMASK, keep_files_private

RELEASE_S: Final = 60.0
_TICK_S: Final = 0.02
_EXIT_NOT_STARTED: Final = 127
HANDLE_VARIABLE: Final = "TRUNKLINE_SESSION_HANDLE"
# The variables that tmux sets for the programs in a pane.
_FROM_THE_PANE: Final = ("TERM", "TMUX", "TMUX_PANE", "COLORTERM")


class SessionSpec(msgspec.Struct, frozen=True):
    """The command of a session, as it is stored in the session's spec file.

    Attributes:
        session: The session's name.
        command: The program and its arguments.
        folder: The folder in which the command runs.
        environment: The command's environment, to which the wrapper adds tmux's variables and the run's handle.
        instructions: The text on the command's standard input. None: it has the wrapper's standard input.
        umask: The command's umask. Spec files of earlier versions have none; then it is 077.
    """

    session: str
    command: list[str]
    folder: str
    environment: dict[str, str]
    instructions: str | None = None
    umask: int = PRIVATE_UMASK


class SessionEnd(msgspec.Struct, frozen=True):
    """The end of a session's command: the handle of the run, and the exit code.

    `exit_code` is 128 + n if signal n ended the command, and 127 if the command could not be started.
    """

    handle: str
    exit_code: int


def release_file(spec_path: Path, handle: str) -> Path:
    """Return the path of a file for which a session's wrapper process waits before it starts the command.

    `SessionHost.release` makes the file. `spec_path` is the session's spec file, and `handle` names the run.
    """
    return spec_path.with_name(f"go-{hashlib.sha256(handle.encode()).hexdigest()[:16]}")


def end_file(spec_path: Path) -> Path:
    """Return the path of the file into which the wrapper writes the exit code of the session's command.

    The file is next to the spec file `spec_path`. Each run of the session replaces it at its end.
    """
    return spec_path.with_name("end.json")


def main(arguments: list[str]) -> int:
    """Wait until this run is released, run the session's command to its end, and return its exit code.

    A run is released when the file of `release_file` exists. The exit code is 127 if that takes longer than a
    minute or the command cannot be started. This process ignores SIGTERM, SIGINT and SIGHUP: the command gets
    them, too, and the wrapper waits for its end.

    Args:
        arguments: The path of the spec file, and the handle of the run. The handle `process` means that this
            process leads the run.
    """
    spec_path = Path(arguments[0])
    handle = arguments[1]
    if handle == PROCESS:
        handle = process_handle(os.getpid()) or handle
    # A stop signals all processes of the session. The command decides how to react; the runner waits for it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ignored)
    spec = msgspec.json.decode(spec_path.read_bytes(), type=SessionSpec)
    if not _released(release_file(spec_path, handle)):
        print("the session was not released in time; nothing was started", file=sys.stderr)
        return _EXIT_NOT_STARTED
    code = _run(spec, handle)
    draft = spec_path.with_name(f".end.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(SessionEnd(handle, code)))
    draft.replace(end_file(spec_path))
    return code


def _released(file: Path) -> bool:
    deadline = time.monotonic() + RELEASE_S
    while time.monotonic() < deadline:
        if file.exists():
            file.unlink(missing_ok=True)
            return True
        time.sleep(_TICK_S)
    return False


def _run(spec: SessionSpec, handle: str) -> int:
    pane = {name: os.environ[name] for name in _FROM_THE_PANE if name in os.environ}
    environment = {**spec.environment, **pane, HANDLE_VARIABLE: handle}
    try:
        with _standard_input(spec.instructions) as given:
            child = subprocess.Popen(  # noqa: S603
                spec.command, cwd=spec.folder, env=environment, stdin=given, umask=spec.umask
            )
    except OSError as error:
        print(f"cannot start {spec.command[0]!r}: {error.strerror}", file=sys.stderr)
        return _EXIT_NOT_STARTED
    code = child.wait()
    return code if code >= 0 else 128 - code


def _standard_input(instructions: str | None) -> IO[bytes]:
    if instructions is None:
        return os.fdopen(os.dup(0), "rb")
    # A file, not a pipe: nothing has to keep writing while the agent reads slowly.
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    file.write(instructions.encode("utf-8"))
    file.seek(0)
    return file


def _ignored(number: int, frame: FrameType | None) -> None:
    """Do nothing. This is a handler because the command would inherit SIG_IGN."""


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main(sys.argv[1:]))
