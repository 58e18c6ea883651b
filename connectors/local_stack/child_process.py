"""Child processes that do not outlive the stack: started, marked, and ended with all that they start.

Each of three mechanisms covers a gap of the others. The kernel kills a child when the thread that started it
ends, but not its grandchildren; so start children from a thread that lasts, normally the main one. The process
session contains most descendants, but Spark's Python workers leave it. The mark in the environment finds every
process, also after the supervisor was killed, and does not depend on process ids, which are used again.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from connectors.processes import process_tree
from schemas.errors import TrunklineError

MARK = "TRUNKLINE_STACK_PART"
_END_S = 10.0


def mark_of(data_path: Path, part: str) -> str:
    """Return the mark of one part of the stack with this data directory.

    For "" it is the prefix of the marks of all parts. No part's mark is a prefix of another part's.
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
    """Start a process that leads a session of its own and appends its output to the log."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise TrunklineError("setpriv is not found: sudo apt-get install -y util-linux")
    log.parent.mkdir(parents=True, exist_ok=True)
    with process_tree.open_private_log(log) as output:
        return process_tree.start_process(
            # setpriv instead of a preexec function, which is not safe in a process with threads.
            [setpriv, "--pdeathsig", "KILL", "--", *command],
            cwd=cwd,
            environment={**environment, MARK: mark},
            output=output,
        )


def marked_processes(prefix: str) -> list[psutil.Process]:
    """Return all running processes whose mark begins with `prefix`."""
    found = process_tree.running_processes()
    return [process for process in found if (process_tree.mark_of(process, MARK) or "").startswith(prefix)]


def kill_marked(prefix: str) -> int:
    """Send SIGKILL to all processes whose mark begins with `prefix`, until none runs. Return their number."""
    return len(process_tree.end_processes(lambda: marked_processes(prefix), kill_s=_END_S))


def stop_child(
    process: subprocess.Popen[bytes], mark: str, within_s: float, terminate: Callable[[int], None]
) -> bool:
    """Ask a process to end, wait at most `within_s` seconds, then kill all that is left of its tree.

    Returns whether it ended by itself in time.
    """
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
    """Kill a process and its whole tree: its session, all processes below it, and all with its mark."""
    first = psutil.Process(process.pid) if process.poll() is None else None
    process_tree.end_processes(process_tree.ProcessTrees(MARK, {mark: first}).find_all, kill_s=_END_S)
    process.wait(timeout=_END_S)
