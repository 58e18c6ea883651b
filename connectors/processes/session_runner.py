"""Runs the command of one agent session: `python -m connectors.processes.session_runner SPEC HANDLE`.

It reads the session's 0600 spec file (so that no secret stands in an argument), waits until it is released,
runs the command with the spec's environment and instructions, and notes its exit code beside the spec.
Only `connectors.processes.session_host` starts it, in a tmux pane or as the leader of its own process group.
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

from schemas.keys.umask import PRIVATE_UMASK, keep_files_private

RELEASE_S: Final = 60.0
_TICK_S: Final = 0.02
_EXIT_NOT_STARTED: Final = 127
PROCESS: Final = "process"
HANDLE_VARIABLE: Final = "TRUNKLINE_SESSION_HANDLE"
# What tmux tells those who live in it.
_FROM_THE_PANE: Final = ("TERM", "TMUX", "TMUX_PANE", "COLORTERM")


class SessionSpec(msgspec.Struct, frozen=True):
    """The command of a session. `instructions` come on standard input; None leaves it as it is. `umask` is the
    command's; specs of earlier versions have none.
    """

    session: str
    command: list[str]
    folder: str
    environment: dict[str, str]
    instructions: str | None = None
    umask: int = PRIVATE_UMASK


class SessionEnd(msgspec.Struct, frozen=True):
    """How a session's command ended: 128 + n after signal n."""

    handle: str
    exit_code: int


def start_time(pid: int) -> str | None:
    """When a process started: clock ticks since boot and the boot's id; None for none and for a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return None
    # The name in parentheses may hold anything, also parentheses and spaces.
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] in ("Z", "X") else f"{after_name[19]}-{boot[:8]}"


def process_handle(pid: int) -> str | None:
    """`process/<pid>/<start time>`, None for a process that has ended."""
    started = start_time(pid)
    return None if started is None else f"{PROCESS}/{pid}/{started}"


def release_file(spec_path: Path, handle: str) -> Path:
    """The file whose appearance lets this run of the command begin."""
    return spec_path.with_name(f"go-{hashlib.sha256(handle.encode()).hexdigest()[:16]}")


def end_file(spec_path: Path) -> Path:
    """Where the exit code of the newest run stands."""
    return spec_path.with_name("end.json")


def main(arguments: list[str]) -> int:
    """Run the command to its end and return its exit code."""
    spec_path = Path(arguments[0])
    handle = arguments[1]
    if handle == PROCESS:
        handle = process_handle(os.getpid()) or handle
    # Those who end the session signal the whole group; the command decides what it does then, we wait for it.
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
    # A file and not a pipe: nobody has to stay to fill it, however slowly the agent reads.
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    file.write(instructions.encode("utf-8"))
    file.seek(0)
    return file


def _ignored(number: int, frame: FrameType | None) -> None:
    """A handler, not SIG_IGN: the command would inherit that."""


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main(sys.argv[1:]))
