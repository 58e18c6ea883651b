"""Child processes that cannot outlive us: started, marked, ended together with all that they start.

Three nets, because each has a hole. The kernel kills a child when the thread that started it ends (so start
from a thread that lasts, normally the main one), but not its grandchildren. A signal to the process group
reaches most of them, but Spark's Python workers make a group of their own. The mark in the environment finds
every one, also after the supervisor was killed, and is not fooled by a process id that is used again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from schemas.errors import TrunklineError

MARK = "TRUNKLINE_STACK_PART"


def mark_of(data_path: Path, part: str) -> str:
    """The mark of one part of the stack with this data directory; of the whole stack, with which all of them
    begin, for "". No part's mark begins another's.
    """
    return f"{data_path}#{part};" if part else f"{data_path}#"


def start_child(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    mark: str,
    log: Path,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, its output appended to the log."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise TrunklineError("setpriv is not found: sudo apt-get install -y util-linux")
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [setpriv, "--pdeathsig", "KILL", "--", *map(str, command)]
    with log.open("ab") as output:
        # setpriv and not a preexec function: that one is not safe in a process with threads.
        return subprocess.Popen(  # noqa: S603 the commands are ours
            arguments,
            cwd=cwd,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def marked_processes(prefix: str) -> list[psutil.Process]:
    """All running processes whose mark begins like this."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").startswith(prefix) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def kill_marked(prefix: str, within_s: float = 10.0) -> int:
    """SIGKILL whatever bears the mark, until nothing does. Returns how many there were."""
    deadline = time.monotonic() + within_s
    killed: set[int] = set()
    while found := marked_processes(prefix):
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            killed.add(process.pid)
        psutil.wait_procs(found, timeout=1.0)
        if time.monotonic() > deadline:
            raise TrunklineError(f"processes {sorted(killed)} do not end although they were killed")
    return len(killed)


def stop_child(
    process: subprocess.Popen[bytes], mark: str, within_s: float, terminate: Callable[[int], None]
) -> bool:
    """Ask it to end, wait, then SIGKILL for all that is left. Returns whether it ended by itself in time."""
    in_time = True
    if process.poll() is None:
        terminate(process.pid)
        try:
            process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            in_time = False
    end_child(process, mark)
    return in_time


def end_child(process: subprocess.Popen[bytes], mark: str) -> None:
    """SIGKILL for the process, its group and whatever else bears its mark."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.wait(timeout=10)
    kill_marked(mark)
