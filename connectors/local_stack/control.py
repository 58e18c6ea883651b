"""Starting, watching and ending a stack that another process supervises: what `up`, `down` and `status` do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from connectors.local_stack import child_process, state_file
from connectors.local_stack.log_files import last_lines
from connectors.local_stack.part import child_environment
from connectors.local_stack.part_plan import ALL_PARTS
from connectors.local_stack.part_requests import requested
from connectors.local_stack.stack import PLANS, StackRuns, check_addition, check_parts, shown_settings
from connectors.local_stack.supervisor import ANOTHER_RUNS
from connectors.terminal.terminal_text import escaped
from schemas.errors import Refused, TrunklineError
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import PROJECT_ROOT, Settings

_POLL_S = 0.1
# A start is judged by its progress; this is how long `up` waits for one that goes on and on.
UP_LIMIT_S = 1800.0
_DOWN_LIMIT_S = 100.0
_START_ATTEMPTS = 3
# From taking the lock to writing its first state, a supervisor needs milliseconds.
_OTHER_S = 30.0
_QUOTED_LINES = 5

Watcher = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class PartStatus:
    """One line of `status`. `why`: what keeps a part from being ready."""

    name: str
    state: str
    pid: int | None
    uptime_s: float | None
    rss_mb: float | None
    restarts: int
    summary: str
    why: str | None = None


def running_state(settings: Settings) -> dict[str, Any] | None:
    """The state of the stack if its supervisor lives."""
    state = state_file.read_state(settings)
    return state if state is not None and state_file.is_alive(state.get("supervisor")) else None


def start_detached(
    settings: Settings, parts: Iterable[str], watch: Watcher, within_s: float = UP_LIMIT_S
) -> dict[str, Any]:
    """Start a supervisor in the background and wait until these parts are ready. In a stack that runs already,
    add those that it lacks.

    Args:
        watch: called with each state while it waits.
        within_s: how long to wait at most. The parts go on starting afterwards.

    Raises TrunklineError that names the parts that are not ready, and Refused for parts that cannot be added;
    the other parts go on running. Ctrl-C ends what this call has started.
    """
    wanted = check_parts(parts)
    for name in wanted:
        # Settings that cannot work are found here, before anything is started.
        PLANS[name](settings)
    deadline = time.monotonic() + within_s
    for _ in range(_START_ATTEMPTS):
        state = _running_and_not_stopping(settings)
        if state is not None:
            with _asked_for_missing(settings, state, wanted):
                return _wait_until_up(settings, watch, wanted, deadline, _Followed(state["supervisor"]))
        ensure_keyring(settings)
        supervisor = _spawn_supervisor(settings, wanted)
        try:
            return _wait_until_up(settings, watch, wanted, deadline, supervisor)
        except StackRuns:
            # Another `up` was faster. Its supervisor says so within a moment.
            _wait_for_other(settings)
        except KeyboardInterrupt:
            _end_supervisor(settings, supervisor, watch)
            stop_detached(settings, watch)
            raise
    raise TrunklineError(f"another process holds {settings.data_path} and runs no stack: trunkline down")


def differing_settings(state: dict[str, Any], settings: Settings) -> list[str]:
    """The variables of the settings, but for secrets, that the running stack has with another value."""
    own, theirs = shown_settings(settings), state["settings"]
    return sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))


@dataclass(frozen=True)
class _Followed:
    """The supervisor that another process has started, looked at as if it were a child of ours."""

    identity: dict[str, Any]

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.identity["pid"])

    def poll(self) -> int | None:
        """None while it runs, else 0: its exit code is another's to know."""
        return None if state_file.is_alive(self.identity) else 0


def _running_and_not_stopping(settings: Settings) -> dict[str, Any] | None:
    deadline = time.monotonic() + _DOWN_LIMIT_S
    while (state := running_state(settings)) is not None and state["phase"] == state_file.STOPPING:
        if time.monotonic() > deadline:
            raise TrunklineError("a stack is being stopped and does not end: trunkline down")
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
            f"the stack of process {state['supervisor']['pid']} has no {', '.join(missing)}, and takes no more "
            "parts: end that process, or set another data_dir"
        )
    if differing := differing_settings(state, settings):
        raise Refused(
            f"{', '.join(missing)} cannot be added: the stack runs with other values of "
            f"{', '.join(differing)}. Set them as it has them, or do trunkline down, then trunkline up"
        )
    check_addition(state["names"], missing)
    return requested(settings, missing)


def _end_supervisor(settings: Settings, supervisor: subprocess.Popen[bytes], watch: Watcher) -> None:
    """End the process that was started: it may not have said yet that it is there."""
    if supervisor.poll() is None:
        named = state_file.identity(supervisor.pid)
        supervisor.terminate()
        _wait_until_down(settings, named, watch)
        supervisor.wait()


def _spawn_supervisor(settings: Settings, parts: tuple[str, ...]) -> subprocess.Popen[bytes]:
    log = settings.data_path / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-P", "-m", "connectors.local_stack.supervisor", *parts],
            cwd=PROJECT_ROOT,
            env=child_environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_up(
    settings: Settings,
    watch: Watcher,
    wanted: tuple[str, ...],
    deadline: float,
    supervisor: subprocess.Popen[bytes] | _Followed,
) -> dict[str, Any]:
    """Wait until each of these parts is ready or has been given up; raise StackRuns when another supervisor has
    the data directory.
    """
    state: dict[str, Any] | None = None
    while time.monotonic() < deadline:
        code = supervisor.poll()
        if code == ANOTHER_RUNS:
            raise StackRuns(f"another process runs the stack with data_dir {settings.data_path}")
        found = state_file.read_state(settings)
        if found is not None and found["supervisor"]["pid"] == supervisor.pid:
            state = found
            watch(state)
            if state["phase"] == state_file.FAILED:
                state_file.remove_state(settings)
                raise TrunklineError(state["error"])
            if state["phase"] != state_file.STOPPING and _are_settled(state, wanted):
                return _all_ready(state, wanted)
        if code == 0:
            raise TrunklineError("the stack was stopped, by trunkline down or a signal, before all was ready")
        if code is not None:
            raise TrunklineError(_supervisor_died(settings))
        time.sleep(_POLL_S)
    if state is None:
        raise TrunklineError(f"the supervisor has not reported anything; {_supervisor_log(settings)}")
    return _all_ready(state, wanted)


def _wanted_parts(state: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {name: part for name, part in state["parts"].items() if part["group"] in wanted}


def _are_settled(state: dict[str, Any], wanted: tuple[str, ...]) -> bool:
    if not set(wanted) <= set(state["names"]):
        return False
    return all(state_file.is_settled(state["parts"], name) for name in _wanted_parts(state, wanted))


def _all_ready(state: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """Return the state, or raise TrunklineError that says which parts are not ready and why."""
    missing = [name for name in wanted if name not in state["names"]]
    told = [f"{name}: the supervisor has not added it; see trunkline logs supervisor" for name in missing]
    for name, part in _wanted_parts(state, wanted).items():
        if part["state"] != "ready":
            told.append(f"{name}: {part_reason(part)}")
            lines = [] if part["waits_for"] else last_lines(Path(part["log"]), _QUOTED_LINES)
            told += [f"    {escaped(line)}" for line in lines]
    if not told:
        return state
    raise TrunklineError(
        "\n".join(
            (
                "not ready yet; what runs goes on, and what has ended is started again (trunkline status):",
                *(f"  {line}" for line in told),
            )
        )
    )


def part_reason(part: dict[str, Any]) -> str:
    """Why a part of a state is not ready, in one sentence."""
    if part["waits_for"]:
        return f"waits for {part['waits_for']}"
    if part["state"] == "unresponsive":
        return "runs and does not answer"
    return part["failure"] or f"still {part['state']}"


def _supervisor_log(settings: Settings) -> str:
    log = settings.data_path / "logs" / "supervisor.log"
    quoted = "\n".join(f"    {line}" for line in last_lines(log, 12))
    return f"its log is {log}, which ends:\n{quoted}"


def _supervisor_died(settings: Settings) -> str:
    return f"the supervisor ended before all was ready; {_supervisor_log(settings)}"


def stop_detached(settings: Settings, watch: Watcher) -> bool:
    """Stop the stack, and whatever a killed supervisor left behind. Returns whether there was any."""
    state = running_state(settings)
    everything = child_process.mark_of(settings.data_path, "")
    if state is not None:
        supervisor = state["supervisor"]
        if not state["detached"]:
            raise Refused(
                f"this stack belongs to process {supervisor['pid']}, which stops it when it ends: end that"
            )
        os.kill(supervisor["pid"], signal.SIGTERM)
        _wait_until_down(settings, supervisor, watch)
    left = child_process.kill_marked(everything)
    state_file.remove_state(settings)
    return state is not None or left > 0


def _wait_until_down(settings: Settings, supervisor: dict[str, Any], watch: Watcher) -> None:
    deadline = time.monotonic() + _DOWN_LIMIT_S
    while state_file.is_alive(supervisor):
        state = state_file.read_state(settings)
        if state is not None:
            watch(state)
        if time.monotonic() > deadline:
            # It hangs: the parts are found by their marks afterwards.
            psutil.Process(supervisor["pid"]).kill()
            deadline = time.monotonic() + 10
        time.sleep(_POLL_S)


def _rss_mb(process: psutil.Process) -> float:
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.Error:
            continue
    return total / 2**20


def part_statuses(settings: Settings) -> list[PartStatus]:
    """How each part is now. Parts of a stack whose supervisor was killed are shown as they are."""
    state = state_file.read_state(settings) or {"parts": {}}
    found = []
    more = [name for name in state["parts"] if name not in ALL_PARTS]
    for name in (*ALL_PARTS, *more):
        found.append(_part_status(name, state["parts"].get(name)))
    return found


def _part_status(name: str, known: dict[str, Any] | None) -> PartStatus:
    if known is None:
        return PartStatus(name, "stopped", None, None, None, 0, "")
    restarts, summary = known["restarts"], known["summary"]
    why = None if known["state"] == "ready" else part_reason(known)
    if state_file.is_alive(known):
        with suppress(psutil.Error):
            process = psutil.Process(known["pid"])
            age, rss = time.time() - process.create_time(), _rss_mb(process)
            return PartStatus(name, known["state"], process.pid, age, rss, restarts, summary, why)
    state = "waiting" if known["state"] == "waiting" else "stopped"
    return PartStatus(name, state, None, None, None, restarts, summary, why)
