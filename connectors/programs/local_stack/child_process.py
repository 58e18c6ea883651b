"""The local stack's child processes: starts, observes and ends them, so that none of them outlives the stack.

Each of three mechanisms covers a gap of the others. The kernel kills a child when the thread that started it
ends, but not its grandchildren; so start children from a thread that lasts, normally the main one. The process
session contains most descendants, but Spark's Python workers leave it. The mark in the environment finds every
process, also after the supervisor was killed, and does not depend on process ids, which are used again.

A part of the stack is observed, too: whether its start makes progress, and whether it still answers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO
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
    log: Path | IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start a process that leads a process session of its own (setsid(2)), and return it at once.

    The kernel kills the process when the calling thread ends.

    Args:
        command: The program and its arguments.
        cwd: The folder in which the process runs.
        environment: The whole environment of the process. The mark is added to it.
        mark: The result of `mark_of`, by which `marked_processes` finds the process and its descendants.
        log: The file to which the output of the process is appended, or the open file that gets it.

    Raises:
        TrunklineError: The program setpriv is not installed.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise TrunklineError("setpriv is not found: sudo apt-get install -y util-linux")
    with ExitStack() as opened:
        if isinstance(log, Path):
            log.parent.mkdir(parents=True, exist_ok=True)
            output: IO[bytes] = opened.enter_context(process_tree.open_private_log(log))
        else:
            output = log
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


EVERY_S = 3.0
MISSES = 3
_SAMPLE_S = 1.0
_MOST_NICE = 19
_AUTOGROUP_TRIES = 5
_AUTOGROUP_PAUSE_S = 0.12
# A thread that starts during one pass is found in the next one.
_PASSES = 10


class AnswerProbe:
    """A thread that asks a ready part every three seconds whether it still answers. End it with `end`.

    So no caller waits for an answer that does not come. The thread starts at once.

    Args:
        name: The part's name.
        is_well: Asks the part. It returns whether it answered, and may take seconds.

    Attributes:
        is_silent: True after three requests in a row without an answer, False after an answer.
    """

    def __init__(self, name: str, is_well: Callable[[], bool]) -> None:
        self.is_silent = False
        self._is_well = is_well
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name=f"probe-{name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send no more requests. The call does not wait for a request that is in progress."""
        self._over.set()

    def _ask(self) -> None:
        missed = 0
        while not self._over.wait(EVERY_S):
            missed = 0 if self._is_well() else missed + 1
            self.is_silent = missed >= MISSES


class StartProgress:
    """A measure of the progress of one start of a part: its processes use the processor, or its log grows.

    A start on a slow machine takes longer and still makes progress, so the duration of a start has no limit.

    Args:
        pid: The part's process.
        log: The part's log file.
    """

    def __init__(self, pid: int, log: Path) -> None:
        self._pid = pid
        self._log = log
        self._seen = self._measure()
        self._sampled_at = self._moved_at = time.monotonic()

    def stalled_for_s(self) -> float:
        """Return for how many seconds the part's processes used no processor time and its log did not grow.

        A part that only waits counts as stalled. Measures at most once a second, and between two measurements
        compares with the last one.
        """
        now = time.monotonic()
        if now - self._sampled_at >= _SAMPLE_S:
            self._sampled_at = now
            seen = self._measure()
            if seen != self._seen:
                self._seen, self._moved_at = seen, now
        return now - self._moved_at

    def _measure(self) -> tuple[float, int]:
        """Return the processor time of all processes of the part, and the size of its log."""
        try:
            size = self._log.stat().st_size
        except OSError:
            size = 0
        total = 0.0
        for process in processes_below(self._pid):
            with suppress(psutil.Error):
                # User and system, own and of children that were waited for.
                total += sum(process.cpu_times()[:4])
        return round(total, 3), size


def processes_below(pid: int) -> list[psutil.Process]:
    """Return the process `pid` and all its running descendants; none if it has ended."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def set_niceness(pid: int, niceness: int) -> None:
    """Raise the nice value of the process `pid` and of all processes that it started.

    Linux also schedules whole POSIX sessions (setsid(2)) by a nice value, so that of the session of `pid` is
    raised, too. New threads and processes inherit the value. Linux has a nice value for each thread
    (setpriority(2)): a change for the process alone would skip the other threads of a JVM. Processes that have
    ended, or belong to another user, are skipped. A second call changes nothing.

    Args:
        pid: the first process. It has been started in a POSIX session of its own.
        niceness: the difference to the nice value of the calling process, 0 to 19.
    """
    value = min(_MOST_NICE, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
    for _ in range(_PASSES):
        if not _set_threads(processes_below(pid), value):
            break
    _set_session(pid, niceness)


def set_idle(pid: int, names: str) -> None:
    """Let the threads of a process whose names begin with `names` run only when no other one of it wants to.

    Where threads have no nice value of their own, this does nothing.
    """
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                if (thread / "comm").read_text().startswith(names):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), _MOST_NICE)


def _set_threads(processes: Iterable[psutil.Process], value: int) -> bool:
    """Return whether a thread had another value."""
    changed = False
    for process in processes:
        try:
            threads = [int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir()]
        except OSError:
            continue
        for thread in threads:
            with suppress(OSError):
                if os.getpriority(os.PRIO_PROCESS, thread) != value:
                    os.setpriority(os.PRIO_PROCESS, thread, value)
                    changed = True
    return changed


def _set_session(pid: int, niceness: int) -> None:
    """Set the nice value of the session, where Linux schedules sessions against each other.

    A process's own value counts only within its session then (sched(7), autogroup). Other systems have no such
    file.
    """
    for _ in range(_AUTOGROUP_TRIES):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
        except BlockingIOError:  # the kernel allows one change in a tenth of a second, for the whole machine
            time.sleep(_AUTOGROUP_PAUSE_S)
        except OSError:
            return
        else:
            return
