"""Lower the priority of a part once it is ready: of its processes, of their threads, and of its session."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

_MOST = 19
_AUTOGROUP_TRIES = 5
_AUTOGROUP_PAUSE_S = 0.12
# A thread that was started while the others were changed is found in the next pass.
_PASSES = 10


def set_niceness(pid: int, niceness: int) -> None:
    """Set the nice value of the process `pid`, of all that it started, and of their session: `niceness` (0 to
    19) more than that of this process. From then on new threads and processes inherit it.

    Linux has a nice value for each thread (setpriority(2)): setting that of the process would leave a JVM's
    other threads as they were. Processes that have ended, or are not ours, are left out.
    """
    value = min(_MOST, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
    for _ in range(_PASSES):
        if not _set_threads(_tree(pid), value):
            break
    _set_session(pid, niceness)


def _tree(pid: int) -> list[int]:
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return [pid]


def _set_threads(pids: list[int], value: int) -> bool:
    """Return whether a thread had another value."""
    changed = False
    for pid in pids:
        try:
            threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:
            continue
        for thread in threads:
            with suppress(OSError):
                if os.getpriority(os.PRIO_PROCESS, thread) != value:
                    os.setpriority(os.PRIO_PROCESS, thread, value)
                    changed = True
    return changed


def _set_session(pid: int, niceness: int) -> None:
    """Where Linux schedules sessions against each other, a process's own value counts only within its session
    (sched(7), autogroup). Elsewhere there is no such file.
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
