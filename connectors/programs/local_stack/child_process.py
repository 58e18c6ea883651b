"""Starts and ends the local stack's child processes, so that none of them outlives the stack.

Each of three mechanisms covers a gap of the others. The kernel kills a child when the thread that started it
ends, but not its grandchildren; so start children from a thread that lasts, normally the main one. The process
session contains most descendants, but Spark's Python workers leave it. The mark in the environment finds every
process, also after the supervisor was killed, and does not depend on process ids, which are used again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import psutil

from connectors.plumbing.machine import process_tree
from trunkline_agent.errors import TrunklineError

MARK = "TRUNKLINE_STACK_PART"
_END_S = 10.0


def mark_of(data_path: Path, part: str) -> str:
    """Return the text that marks all processes of a part in their environment, in the variable MARK.

    Args:
        data_path: The data directory of the stack.
        part: The part's name. "": the result is the common beginning of all parts' marks.
    """
    # Quoted, so that the marks of the folder `a#b` do not begin like those of the folder `a`.
    folder = quote(os.fsencode(data_path))
    return f"{folder}#{part};" if part else f"{folder}#"


def start_child(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    mark: str,
    log: Path,
) -> subprocess.Popen[bytes]:
    """Start a process that leads a process session of its own (setsid(2)), and return it at once.

    The kernel kills the process when the calling thread ends.

    Args:
        command: The program and its arguments.
        cwd: The folder in which the process runs.
        environment: The whole environment of the process. The mark is added to it.
        mark: The result of `mark_of`, by which `marked_processes` finds the process and its descendants.
        log: The file to which the output of the process is appended.

    Raises:
        TrunklineError: The program setpriv is not installed.
    """
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
    """Return all running processes of this machine whose mark (see `mark_of`) begins with `prefix`."""
    found = process_tree.running_processes()
    return [process for process in found if (process_tree.mark_of(process, MARK) or "").startswith(prefix)]


def kill_marked(prefix: str) -> int:
    """Send SIGKILL to all processes whose mark (see `mark_of`) begins with `prefix`, and return their number.

    The call waits until none of them runs. 0: there was no such process.

    Raises:
        TrunklineError: A process does not end within ten seconds.
    """
    return len(process_tree.end_processes(lambda: marked_processes(prefix), kill_s=_END_S))


def stop_child(
    process: subprocess.Popen[bytes], mark: str, within_s: float, terminate: Callable[[int], None]
) -> bool:
    """Ask a process to end, wait, then kill all that is left of it and its children.

    Args:
        process: The process.
        mark: The mark with which it was started.
        within_s: How long it may take to end by itself, in seconds.
        terminate: Asks the process with this id to end, for example by SIGTERM.

    Returns:
        True: the process had ended before, or ended within `within_s`. False: it was killed.

    Raises:
        TrunklineError: A process of the tree still runs ten seconds after SIGKILL.
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
    """Kill a process and its whole tree: its session, all processes below it, and all with its mark.

    The call waits until all have ended. `mark` is the one with which the process was started.

    Raises:
        TrunklineError: A process still runs ten seconds after SIGKILL.
    """
    first = psutil.Process(process.pid) if process.poll() is None else None
    process_tree.end_processes(process_tree.ProcessTrees(MARK, {mark: first}).find_all, kill_s=_END_S)
    process.wait(timeout=_END_S)
