"""Starts, watches and stops a stack in the background, for `trunkline up`, `down` and `status`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from connectors.plumbing.machine import state_file
from connectors.plumbing.machine.process_tree import open_private_log, start_process
from connectors.programs.local_stack import child_process
from connectors.programs.local_stack.child_process import processes_below
from connectors.programs.local_stack.data_files import last_lines
from connectors.programs.local_stack.part import child_environment
from connectors.programs.local_stack.part_plan import ALL_PARTS, group_of
from connectors.programs.local_stack.stack import (
    StackRuns,
    check_addition,
    check_no_part_runs_alone,
    check_parts,
    plans_of,
    shown_settings,
)
from connectors.programs.local_stack.supervisor import ANOTHER_RUNS
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import PROJECT_ROOT, Settings
from trunkline_agent.errors import Refused, TrunklineError
from trunkline_agent.terminal_text import escaped

_POLL_S = 0.1
# A start fails when it makes no progress. This limits the wait for a start that makes progress for long.
UP_LIMIT_S = 1800.0
_DOWN_LIMIT_S = 100.0
_KILLED_S = 10.0
_START_ATTEMPTS = 3
# A supervisor needs milliseconds from its lock to its first state.
_OTHER_S = 30.0
_QUOTED_LINES = 5

Watcher = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class PartStatus:
    """The status of one part, as `trunkline status` shows it.

    Attributes:
        name: The part's name.
        state: Its state, such as `ready` or `stopped`.
        pid: The id of its process. None: it does not run.
        uptime_s: For how many seconds the process has run. None: it does not run.
        rss_mb: The memory of the process and all that it started, in MiB. None: it does not run.
        restarts: How often it was started again.
        memory_kills: How often it ended because the kernel killed it, or a process of it, for memory.
        summary: A text such as `Kafka on 127.0.0.1:9092`.
        why: Why the part is not ready. None: it is ready, or was never started.
    """

    name: str
    state: str = "stopped"
    pid: int | None = None
    uptime_s: float | None = None
    rss_mb: float | None = None
    restarts: int = 0
    memory_kills: int = 0
    summary: str = ""
    why: str | None = None


def running_state(settings: Settings) -> dict[str, Any] | None:
    """Return the newest state in the state file, or None if no supervisor of this data directory runs.

    The state is the dictionary that `LocalStack.write_state` has written: phase, supervisor and parts.
    """
    state = state_file.read_state(settings)
    return state if state is not None and state_file.is_alive(state.get("supervisor")) else None


def start_detached(
    settings: Settings, parts: Iterable[str], watch: Watcher, within_s: float = UP_LIMIT_S
) -> dict[str, Any]:
    """Start a supervisor in the background, wait until these parts are ready, and return the stack's state.

    If a stack runs already, the parts that it lacks are added to it. Ctrl-C ends a supervisor that this call
    has started.

    Args:
        settings: the settings of the stack.
        parts: the names of the wanted parts, such as `kafka`.
        watch: called about ten times a second with the newest state during the wait.
        within_s: how long to wait at most, in seconds. Parts that are not ready then go on starting.

    Raises:
        TrunklineError: parts are not ready, and the message names them; the other parts go on running.
        UsageError: a part's name is unknown, or the settings do not allow the part.
        Refused: a part cannot be added to the running stack, or parts run in the foreground.
    """
    wanted = check_parts(parts)
    check_no_part_runs_alone(settings)
    # Finds settings that cannot work before anything is started.
    plans_of(settings, wanted)
    deadline = time.monotonic() + within_s
    for _ in range(_START_ATTEMPTS):
        state = _running_and_not_stopping(settings)
        if state is not None:
            other = state["supervisor"]
            with _asked_for_missing(settings, state, wanted):
                exit_code = partial(_exit_code_of_other, other)
                return _wait_until_up(settings, watch, wanted, deadline, other["pid"], exit_code)
        ensure_keyring(settings)
        supervisor = _spawn_supervisor(settings, wanted)
        try:
            return _wait_until_up(settings, watch, wanted, deadline, supervisor.pid, supervisor.poll)
        except StackRuns:
            # Another `up` was faster. Its supervisor writes a state within a moment.
            _wait_for_other(settings)
        except KeyboardInterrupt:
            _end_supervisor(settings, supervisor, watch)
            stop_detached(settings, watch)
            raise
    raise TrunklineError(
        f"another process has locked {settings.data_path} and runs no stack: run trunkline down"
    )


def differing_settings(state: dict[str, Any], settings: Settings) -> list[str]:
    """Return the names of the settings, as environment variables, that differ from those of the running stack.

    Secrets are not compared. An empty list means that the others are equal.

    Args:
        state: The running stack's state, which has its settings.
        settings: The caller's settings.
    """
    own, theirs = shown_settings(settings), state["settings"]
    return sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))


def _running_and_not_stopping(settings: Settings) -> dict[str, Any] | None:
    deadline = time.monotonic() + _DOWN_LIMIT_S
    while (state := running_state(settings)) is not None and state["phase"] == state_file.STOPPING:
        if time.monotonic() > deadline:
            raise TrunklineError("a stack is being stopped and does not end: run trunkline down")
        time.sleep(_POLL_S)
    return state


def _wait_for_other(settings: Settings) -> None:
    deadline = time.monotonic() + _OTHER_S
    while running_state(settings) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _asked_for_missing(
    settings: Settings, state: dict[str, Any], wanted: tuple[str, ...]
) -> AbstractContextManager[None]:
    missing = [name for name in wanted if name not in state["names"]]
    if not missing:
        return nullcontext()
    if not state["detached"]:
        raise Refused(
            f"the stack of process {state['supervisor']['pid']} runs without {', '.join(missing)} and "
            "takes no requests for parts: end that process, or set another data_dir"
        )
    if differing := differing_settings(state, settings):
        raise Refused(
            f"{', '.join(missing)} cannot be added: the stack runs with other values of "
            f"{', '.join(differing)}. Set the same values, or run trunkline down, then trunkline up"
        )
    check_addition(state["names"], missing)
    return state_file.requested(settings, missing)


def _end_supervisor(settings: Settings, supervisor: subprocess.Popen[bytes], watch: Watcher) -> None:
    """End a supervisor that this process has started. It may not have written a state yet."""
    if supervisor.poll() is None:
        named = state_file.identity(supervisor.pid)
        supervisor.terminate()
        _wait_until_down(settings, named, watch)
        supervisor.wait()


def _spawn_supervisor(settings: Settings, parts: tuple[str, ...]) -> subprocess.Popen[bytes]:
    log = _supervisor_log(settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "connectors.programs.local_stack.supervisor", *parts]
    with open_private_log(log) as output:
        return start_process(command, cwd=PROJECT_ROOT, environment=child_environment(settings), output=output)


def _wait_until_up(
    settings: Settings,
    watch: Watcher,
    wanted: tuple[str, ...],
    deadline: float,
    pid: int,
    exit_code: Callable[[], int | None],
) -> dict[str, Any]:
    """Wait until each of these parts is ready or has failed repeatedly.

    `exit_code` returns that of the supervisor `pid` once it has ended. Raises StackRuns when another supervisor
    uses the data directory.
    """
    state: dict[str, Any] | None = None
    while time.monotonic() < deadline:
        code = exit_code()
        if code == ANOTHER_RUNS:
            raise StackRuns(f"another process runs the stack with data_dir {settings.data_path}")
        found = state_file.read_state(settings)
        if found is not None and found["supervisor"]["pid"] == pid:
            state = found
            watch(state)
            if state["phase"] == state_file.FAILED:
                state_file.remove_state(settings)
                raise TrunklineError(state["error"])
            if state["phase"] != state_file.STOPPING and _are_settled(state, wanted):
                return _all_ready(state, wanted)
        if code == 0:
            raise TrunklineError("trunkline down or a signal stopped the stack before all parts were ready")
        if code is not None:
            raise TrunklineError(f"the supervisor ended before all parts were ready; {_quoted_log(settings)}")
        time.sleep(_POLL_S)
    if state is None:
        raise TrunklineError(f"the supervisor has not reported anything; {_quoted_log(settings)}")
    return _all_ready(state, wanted)


def _exit_code_of_other(supervisor: dict[str, Any]) -> int | None:
    """Return 0 for a supervisor that has ended: only its parent knows its exit code."""
    return None if state_file.is_alive(supervisor) else 0


def _wanted_parts(state: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {name: part for name, part in state["parts"].items() if part["group"] in wanted}


def _are_settled(state: dict[str, Any], wanted: tuple[str, ...]) -> bool:
    settled = (state_file.is_settled(state["parts"], name) for name in _wanted_parts(state, wanted))
    return set(wanted) <= set(state["names"]) and all(settled)


def _all_ready(state: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """Return the state, or raise TrunklineError with the parts that are not ready and the reasons."""
    missing = [name for name in wanted if name not in state["names"]]
    lines = [f"{name}: the supervisor has not added it; see trunkline logs supervisor" for name in missing]
    for name, part in _wanted_parts(state, wanted).items():
        if part["state"] != "ready":
            lines.append(f"{name}: {part_reason(part)}")
            if not part["waits_for"]:
                quoted = last_lines(Path(part["log"]), _QUOTED_LINES)
                lines += [f"    {escaped(line)}" for line in quoted]
    if not lines:
        return state
    first = "not ready yet; running parts go on, and ended ones are started again (see trunkline status):"
    raise TrunklineError("\n  ".join((first, *lines)))


def part_reason(part: dict[str, Any]) -> str:
    """Return why a part of the stack is not ready, as a text that follows the part's name.

    `part` is the part's entry in the stack's state.
    """
    if part["waits_for"]:
        return f"waits for {part['waits_for']}"
    if part["state"] == "unresponsive":
        return "runs and does not answer"
    return part["failure"] or f"still {part['state']}"


def _supervisor_log(settings: Settings) -> Path:
    return settings.data_path / "logs" / "supervisor.log"


def _quoted_log(settings: Settings) -> str:
    log = _supervisor_log(settings)
    quoted = "\n".join(f"    {line}" for line in last_lines(log, 12))
    return f"its log is {log}, which ends:\n{quoted}"


def stop_detached(settings: Settings, watch: Watcher) -> bool:
    """Stop the stack that runs in the background, wait for its end, and return whether anything was running.

    A supervisor that does not end within 100 seconds is killed. Processes that a killed supervisor has left are
    killed, too.

    Args:
        settings: the settings with the data directory of the stack.
        watch: called about ten times a second with the newest state during the wait.

    Raises:
        Refused: the stack, or some of its parts, run in the foreground of other processes, which must be ended.
    """
    state = running_state(settings)
    if state is not None:
        supervisor = state["supervisor"]
        if not state["detached"]:
            raise Refused(
                f"process {supervisor['pid']} runs this stack and stops it when it ends: end that process"
            )
        with suppress(psutil.NoSuchProcess):
            psutil.Process(supervisor["pid"]).terminate()
        _wait_until_down(settings, supervisor, watch)
    else:
        check_no_part_runs_alone(settings)
    left = child_process.kill_marked(child_process.mark_of(settings.data_path, ""))
    state_file.remove_state(settings)
    return state is not None or left > 0


def _wait_until_down(settings: Settings, supervisor: dict[str, Any], watch: Watcher) -> None:
    deadline = time.monotonic() + _DOWN_LIMIT_S
    while state_file.is_alive(supervisor):
        state = state_file.read_state(settings)
        if state is not None:
            watch(state)
        if time.monotonic() > deadline:
            # The supervisor hangs. Afterwards the parts are found by their marks.
            psutil.Process(supervisor["pid"]).kill()
            deadline = time.monotonic() + _KILLED_S
        time.sleep(_POLL_S)


def _rss_mb(pid: int) -> float:
    total = 0
    for process in processes_below(pid):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total / 2**20


def part_statuses(settings: Settings) -> list[PartStatus]:
    """Return the present status of each part, also of parts that run although their supervisor was killed.

    A part that never ran is included, with the state `stopped`.
    """
    parts = (state_file.read_state(settings) or {"parts": {}})["parts"]
    names = sorted(
        dict.fromkeys((*ALL_PARTS, *parts)), key=lambda name: (*ALL_PARTS, group_of(name)).index(group_of(name))
    )
    return [_part_status(name, parts.get(name)) for name in names]


def _part_status(name: str, known: dict[str, Any] | None) -> PartStatus:
    if known is None:
        return PartStatus(name)
    why = None if known["state"] == "ready" else part_reason(known)
    status = PartStatus(name, known["state"], restarts=known["restarts"], summary=known["summary"], why=why)
    status = replace(status, memory_kills=known.get("memory_kills", 0))  # older supervisors do not count them
    if state_file.is_alive(known):
        pid = known["pid"]
        return replace(status, pid=pid, uptime_s=time.time() - known["created"], rss_mb=_rss_mb(pid))
    return status if status.state == "waiting" else replace(status, state="stopped")
