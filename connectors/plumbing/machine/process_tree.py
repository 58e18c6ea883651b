"""Process trees on this machine: start one, give it a stable handle, find what still runs of it, and end it.

Agent sessions, launched agents and the parts of the local stack all use these functions. The first process of a
tree leads a session of its own (setsid(2)). A variable in its environment, which its children inherit, marks
what belongs to the tree.

The handle of a tree is `process/<pid>/<start time>`. A process id is used again after its process has ended; a
handle is not, so nothing else is ever ended by mistake.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import psutil

from trunkline_agent.errors import TrunklineError

PROCESS: Final = "process"
# How long a process may take to end after SIGKILL.
KILL_S: Final = 5.0
_WAIT_S: Final = 1.0
_TICK_S: Final = 0.02
_HANDLE: Final = re.compile(rf"{PROCESS}/([1-9][0-9]{{0,8}})/[0-9]+-[0-9a-f]+", re.ASCII).fullmatch
# Processes that this one started. `reap` collects their exit codes, so that they do not stay as zombies.
_children: Final[list[subprocess.Popen[bytes]]] = []


def host_name() -> str:
    """Return this machine's name as the registries store it.

    Characters that a name may not have are replaced by dashes.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    return name[:128] or "localhost"


def clean_environment() -> dict[str, str]:
    """Return this process's environment without tmux's variables and Trunkline's secrets and settings.

    It is the environment for programs of users, such as agents. The variables of this process are not changed.
    """
    ours = ("TRUNKLINE", "MQTT_", "TMUX")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def open_private_log(path: Path, flags: int = 0) -> IO[bytes]:
    """Open a log file for appending in binary mode, and create it with mode 0600. The caller closes it.

    `flags` are more flags of open(2), such as `O_NOFOLLOW`.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags, 0o600), "ab")


def start_process(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    output: IO[bytes],
    umask: int = -1,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that leads a process session of its own (setsid(2)), and return it at once.

    Its standard input is empty. `reap` later collects the exit code. OSError is raised if the program cannot be
    run.

    Args:
        command: the program and its arguments. No shell reads them.
        cwd: the folder in which the process runs.
        environment: the whole environment of the process.
        output: the open file for standard output and standard error.
        umask: the umask of the process. -1: the one of the calling process.
        pass_fds: the open descriptors that the process inherits.
    """
    child = subprocess.Popen(  # noqa: S603  the callers' own programs
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        umask=umask,
        pass_fds=pass_fds,
    )
    _children.append(child)
    return child


def reap() -> None:
    """Collect the exit codes of ended processes from `start_process`, so that none stays as a zombie.

    It does not wait for processes that still run. Thread-safe.
    """
    for child in list(_children):
        if child.poll() is not None:
            with suppress(ValueError):  # another thread was faster
                _children.remove(child)


def start_time(pid: int) -> str | None:
    """Return a text that says when a process started: clock ticks since boot, and the boot's id.

    None: the process does not exist, or is a zombie.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return None
    # The name in parentheses may contain anything, also parentheses and spaces.
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] in ("Z", "X") else f"{after_name[19]}-{boot[:8]}"


def process_handle(pid: int) -> str | None:
    """Return the handle `process/<pid>/<start time>` of a process, or None if it has ended."""
    started = start_time(pid)
    return None if started is None else f"{PROCESS}/{pid}/{started}"


def handle_pid(handle: str) -> int | None:
    """Return the process id in a handle of the form `process/<pid>/<start time>`; None for any other text.

    The process may have ended.
    """
    found = _HANDLE(handle)
    return None if found is None else int(found[1])


def first_process(handle: str) -> psutil.Process | None:
    """Return the process that `handle` names, the first of its tree.

    None: the process has ended, or `handle` does not have the form `process/<pid>/<start time>`.
    """
    pid = handle_pid(handle)
    if pid is None or process_handle(pid) != handle:
        return None
    with suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def mark_of(process: psutil.Process, variable: str) -> str | None:
    """Return the value of an environment variable of another process.

    None: the variable is missing, the process has ended, or its environment may not be read.
    """
    with suppress(psutil.Error, OSError):
        return process.environ().get(variable)
    return None


def running_processes() -> Iterator[psutil.Process]:
    """Yield the processes of this machine that are no zombies."""
    return (process for process in psutil.process_iter() if process_handle(process.pid) is not None)


class ProcessTrees:
    """A search for the running processes of some trees, also after their first processes have ended.

    A process belongs to a tree in three cases. The tree's handle is in its environment (the process is marked).
    Or it is a descendant of a known process of the tree. Or one of these leads its process session. So a
    process is found although it has cleared its environment or has left its process session.

    The process id of a tree's first process may lead another session after the tree has ended. Such a session
    counts only while a known or marked process is in it.

    Args:
        variable: the environment variable with the handle.
        first: by handle of a tree, its first process. None: the caller is not sure which process that is. Then
            only marked processes and their process sessions are found.
    """

    def __init__(self, variable: str, first: Mapping[str, psutil.Process | None]) -> None:
        self._variable = variable
        self._known: dict[str, set[psutil.Process]] = {
            handle: set() if root is None else {root} for handle, root in first.items()
        }

    def find(self) -> dict[str, set[psutil.Process]]:
        """Return the running processes of each tree, by handle, in one pass over all processes of the machine.

        An empty set means that the tree has ended. Found processes are remembered: later calls also find their
        children.
        """
        sessions: dict[int, set[psutil.Process]] = defaultdict(set)
        children: dict[int, set[psutil.Process]] = defaultdict(set)
        found: dict[str, set[psutil.Process]] = {handle: set() for handle in self._known}
        for process in running_processes():
            with suppress(psutil.Error, OSError):
                sessions[os.getsid(process.pid)].add(process)
                children[process.ppid()].add(process)
                if (mark := mark_of(process, self._variable)) in found:
                    found[mark].add(process)
                for handle, known in self._known.items():
                    if process in known:
                        found[handle].add(process)
        for handle, those in found.items():
            leaders = {process.pid for process in self._known[handle] | those}
            if (pid := handle_pid(handle)) is not None:
                leaders.add(pid)
            for leader in leaders:
                if sessions[leader] & those:
                    those |= sessions[leader]
            below = list(those)
            while below:
                more = children[below.pop().pid] - those
                those |= more
                below += more
        self._known = found
        return found

    def find_all(self) -> set[psutil.Process]:
        """Search once, and return the running processes of all trees together.

        An empty set means that all trees have ended.
        """
        return {process for processes in self.find().values() for process in processes}


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process, without waiting.

    A process that has ended or belongs to another user is skipped.
    """
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def end_processes(
    find: Callable[[], Collection[psutil.Process]], grace_s: float = 0.0, kill_s: float = KILL_S
) -> set[int]:
    """End processes: send SIGTERM, wait, then send SIGKILL until `find` returns none.

    The call blocks until all have ended, for about `grace_s` plus `kill_s` seconds at most.

    Args:
        find: returns the processes to end that still run. It is called repeatedly.
        grace_s: how long they may take to end after SIGTERM, in seconds. 0: SIGKILL at once.
        kill_s: how long to repeat SIGKILL, in seconds.

    Returns:
        The ids of all processes that `find` returned. Empty: there was nothing to end.

    Raises:
        TrunklineError: Some processes still run, such as another user's. The message has their ids.
    """
    seen: set[int] = set()
    if grace_s > 0:
        found = find()
        seen |= {process.pid for process in found}
        send_signal(found, signal.SIGTERM)
        _wait(found, grace_s)
    deadline = time.monotonic() + kill_s
    while found := find():
        numbers = {process.pid for process in found}
        seen |= numbers
        if time.monotonic() > deadline:
            raise TrunklineError(f"processes {sorted(numbers)} do not end although they were killed")
        send_signal(found, signal.SIGKILL)
        _wait(found, _WAIT_S)
    return seen


def _wait(processes: Collection[psutil.Process], timeout_s: float) -> None:
    """Wait until they have ended. A zombie has ended, even before its parent collects its exit code."""
    deadline = time.monotonic() + timeout_s
    while any(process_handle(process.pid) and process.is_running() for process in processes):
        if time.monotonic() > deadline:
            break
        time.sleep(_TICK_S)
    reap()
