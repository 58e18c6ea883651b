"""Starting, watching and ending a stack that another process supervises: what `up`, `down` and `status` do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from connectors.local_stack import child_process, state_file
from connectors.local_stack.log_files import last_lines
from connectors.local_stack.part import child_environment
from connectors.local_stack.part_plan import ALL_PARTS
from connectors.local_stack.stack import PLANS, START_LIMIT_S, check_parts
from schemas.errors import Refused, TrunklineError
from schemas.sealing import ensure_keyring
from schemas.settings import PROJECT_ROOT, Settings

_POLL_S = 0.1
# Starting has its own limit; this one is for a supervisor that does not even say so.
_UP_LIMIT_S = START_LIMIT_S + 30
_DOWN_LIMIT_S = 100.0

Watcher = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class PartStatus:
    """One line of `status`."""

    name: str
    state: str
    pid: int | None
    uptime_s: float | None
    rss_mb: float | None
    restarts: int
    summary: str


def running_state(settings: Settings) -> dict[str, Any] | None:
    """The state of the stack if its supervisor lives."""
    state = state_file.read_state(settings)
    return state if state is not None and state_file.is_alive(state.get("supervisor")) else None


def start_detached(settings: Settings, parts: Iterable[str], watch: Watcher) -> dict[str, Any]:
    """Start a supervisor in the background and wait until all is ready. Harmless when it runs already.

    Ctrl-C while waiting ends what was started.
    """
    wanted = check_parts(parts)
    state = running_state(settings)
    if state is not None and state["phase"] in (state_file.STARTING, state_file.RUNNING):
        _require_same_parts(state, wanted)
        return _wait_until_up(settings, watch, None)
    for name in wanted:
        # Settings that cannot work are found here, before anything is started.
        PLANS[name](settings)
    ensure_keyring(settings)
    state_file.remove_state(settings)
    supervisor = _spawn_supervisor(settings, wanted)
    try:
        return _wait_until_up(settings, watch, supervisor)
    except KeyboardInterrupt:
        _end_supervisor(settings, supervisor, watch)
        stop_detached(settings, watch)
        raise


def _end_supervisor(settings: Settings, supervisor: subprocess.Popen[bytes], watch: Watcher) -> None:
    """End the process that was started: it may not have said yet that it is there."""
    if supervisor.poll() is None:
        named = state_file.identity(supervisor.pid)
        supervisor.terminate()
        _wait_until_down(settings, named, watch)
        supervisor.wait()


def _require_same_parts(state: dict[str, Any], wanted: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in state["parts"]]
    if missing:
        raise Refused(
            f"a stack with only {', '.join(state['parts'])} runs already, without {', '.join(missing)}: "
            "trunkline down, then up again"
        )


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
    settings: Settings, watch: Watcher, supervisor: subprocess.Popen[bytes] | None
) -> dict[str, Any]:
    deadline = time.monotonic() + _UP_LIMIT_S
    while time.monotonic() < deadline:
        ended = supervisor is not None and supervisor.poll() is not None
        state = state_file.read_state(settings)
        if state is not None:
            watch(state)
            if state["phase"] == state_file.FAILED:
                state_file.remove_state(settings)
                raise TrunklineError(state["error"])
            if state["phase"] == state_file.RUNNING:
                return state
        if ended or (supervisor is None and running_state(settings) is None):
            raise TrunklineError(_supervisor_died(settings))
        time.sleep(_POLL_S)
    raise TrunklineError(
        f"the stack is not ready after {_UP_LIMIT_S:.0f} s: see trunkline status, then trunkline down"
    )


def _supervisor_died(settings: Settings) -> str:
    log = settings.data_path / "logs" / "supervisor.log"
    quoted = "\n".join(f"    {line}" for line in last_lines(log, 12))
    return f"the supervisor ended before all was ready. Its log is {log}, which ends:\n{quoted}"


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
    if state_file.is_alive(known):
        with suppress(psutil.Error):
            process = psutil.Process(known["pid"])
            age, rss = time.time() - process.create_time(), _rss_mb(process)
            return PartStatus(name, known["state"], process.pid, age, rss, restarts, summary)
    state = "waiting" if known["state"] == "waiting" else "stopped"
    return PartStatus(name, state, None, None, None, restarts, summary)
