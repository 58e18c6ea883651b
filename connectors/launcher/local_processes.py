"""The launcher that runs agents as processes on this machine (HH-05).

An agent is the leader of a process session of its own and outlives whoever started it. Its token and its
addresses are in its environment and nowhere else. `data_dir/agents/<container>/` holds its output and, if it
is hardened, the folder it works in; `data_dir/run/agents/<container>.json` names what runs, so that another
process can end it. The handle is `process/<pid>/<start time>`, which never names two processes.

Hardening keeps an agent within bounds; it is no jail. It runs as the same user, who may read our files, and
root may raise its own limits again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from connectors.launcher import hardening
from connectors.launcher.hardening import HANDLE_VARIABLE, ORDER_VARIABLE
from connectors.launcher.launcher_file import LAUNCHERS_FILE, LaunchRule
from connectors.launcher.protocol import LaunchFailed, LaunchSpec, Started
from connectors.processes.session_host import clean_environment, host_name
from connectors.processes.session_runner import PROCESS, process_handle
from connectors.terminal.terminal_text import escaped
from schemas.errors import TrunklineError
from schemas.keys.umask import PRIVATE_UMASK, user_umask
from schemas.settings.settings import Settings
from schemas.wire.ids import is_name

# An agent that ends within this time, and not with 0, has not started.
EARLY_END_S: Final = 0.3
# Takes a twentieth of a second; this is for a machine that is very busy.
EXEC_S: Final = 20.0
KILL_S: Final = 5.0
_TICK_S: Final = 0.02
DOWN_GRACE_S: Final = 5.0
_QUOTED: Final = 300
_TAIL_BYTES: Final = 64 * 1024
_RUNNER: Final = Path(hardening.__file__)
_HANDLE: Final = re.compile(rf"{PROCESS}/([1-9][0-9]{{0,8}})/[0-9]+-[0-9a-f]+", re.ASCII).fullmatch
# Started by this process and not waited for; asked now and then, so that they do not stay as zombies.
_children: Final[list[subprocess.Popen[bytes]]] = []


class _Run(msgspec.Struct, frozen=True):
    """What a file in `run/agents` says."""

    handle: str
    container: str
    task_id: str


class LocalProcessLauncher:
    """Runs agents as `rules` (image → rule) say. Several of them may serve one data directory."""

    def __init__(self, settings: Settings, rules: Mapping[str, LaunchRule]) -> None:
        self._rules = rules
        self._folder = settings.data_path / "agents"
        self._runs = _RunFiles(settings)
        self._host = host_name()

    def start(self, spec: LaunchSpec) -> Started:
        """Start an agent, and see that it does not end at once. Takes `EARLY_END_S` longer than that needs.

        The same container for the same task again, while it runs, is the same run. Raises LaunchFailed.
        """
        rule = self._rules.get(spec.image)
        if rule is None:
            raise LaunchFailed(f"no command for the image {escaped(spec.image)} in {LAUNCHERS_FILE}")
        if not is_name(spec.container):
            raise LaunchFailed("what is to name the container is no name")
        _reap()
        try:
            for folder in (self._folder, self._folder / spec.container):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(self._folder / spec.container):
                handle = self._running(spec) or self._launch(spec, rule)
        except OSError as error:
            raise LaunchFailed(f"cannot start {spec.container}: {error.strerror or error}") from error
        return Started(handle, self._host)

    def alive(self, handle: str) -> bool:
        """Whether the first process of this run is there. What it has left behind does not count."""
        _reap()
        pid = _pid_of(handle)
        if pid is not None and process_handle(pid) == handle:
            return _mark_of(pid) == handle or self._runs.find(handle) is not None
        if (run := self._runs.find(handle)) is not None and not any(_left_of([handle], {}).values()):
            self._runs.remove(run)
        return False

    def find(self, container: str) -> str | None:
        """The handle of what was started for a container here and has not been stopped."""
        run = self._runs.of(container)
        return None if run is None else run.handle

    def stop(self, handle: str, grace_s: float) -> None:
        """End the agent and all that it started: SIGTERM, at most `grace_s` seconds, SIGKILL.

        Nothing but what was started here, for this data directory or by its mark, is signalled. Raises
        TrunklineError when something does not end.
        """
        run = self._runs.find(handle)
        _end([handle], grace_s, is_noted=run is not None)
        if run is not None:
            self._runs.remove(run)

    def _running(self, spec: LaunchSpec) -> str | None:
        run = self._runs.of(spec.container)
        if run is None or process_handle(_pid_of(run.handle) or 0) != run.handle:
            return None
        if run.task_id != spec.task_id:
            raise LaunchFailed(f"{spec.container} runs already, for another task")
        return run.handle

    def _launch(self, spec: LaunchSpec, rule: LaunchRule) -> str:
        """Start it, held back until its file is written: what runs is always known. Raises OSError, too."""
        folder = self._folder / spec.container
        environment, place = _hardened(spec, rule, folder) if spec.hardened else _plain(spec, rule)
        if not place.is_dir():
            raise LaunchFailed(f"the working_dir of {escaped(spec.image)} in {LAUNCHERS_FILE} is no folder")
        fd = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        ours, theirs = socket.socketpair()
        with os.fdopen(fd, "ab") as output, ours:
            begin = output.seek(0, os.SEEK_END)
            with theirs:
                child = _spawn(spec, rule, environment, place, output.fileno(), theirs.fileno())
            _children.append(child)
            handle = process_handle(child.pid)
            try:
                if handle is not None:
                    self._runs.write(_Run(handle, spec.container, spec.task_id))
                    _let_go(ours, handle)
                code = _early_end(child)
                if handle is None or code not in (None, 0):
                    raise LaunchFailed(_failure(spec, code, folder / "output.log", begin))
            except BaseException:
                self._clean_up(child, handle)
                raise
        return handle

    def _clean_up(self, child: subprocess.Popen[bytes], handle: str | None) -> None:
        """Of a start that has failed nothing is left."""
        if child.poll() is None:
            child.kill()
            child.wait(KILL_S)
        if handle is not None:
            self.stop(handle, 0.0)


def stop_all(settings: Settings, grace_s: float = DOWN_GRACE_S) -> int:
    """End all agents of this data directory, whoever started them; how many there were to end.

    Raises TrunklineError when one does not end. For `down`, after whatever could start another.
    """
    _reap()
    files = _RunFiles(settings)
    runs = files.read()
    count = _end([run.handle for run in runs], grace_s, is_noted=True)
    for run in runs:
        files.remove(run)
    return count


class _RunFiles:
    """The files that say what runs, one for each container."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.data_path / "run" / "agents"

    def write(self, run: _Run) -> None:
        """Note what runs in a container, in one step. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._folder / f".{run.container}.{os.getpid()}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(run))
        draft.replace(self._path(run.container))

    def of(self, container: str) -> _Run | None:
        """What was noted for a container."""
        try:
            found = msgspec.json.decode(self._path(container).read_bytes(), type=_Run)
        except (OSError, ValueError, RecursionError):
            return None
        return found if found.container == container else None

    def read(self) -> list[_Run]:
        """All of them."""
        names = [path.name for path in self._folder.glob("[!.]*.json")]
        return [run for name in sorted(names) if (run := self.of(name.removesuffix(".json"))) is not None]

    def find(self, handle: str) -> _Run | None:
        """What was noted with this handle."""
        return next((run for run in self.read() if run.handle == handle), None)

    def remove(self, run: _Run) -> None:
        """Forget it, unless something else runs in its container by now."""
        if self.of(run.container) == run:
            self._path(run.container).unlink(missing_ok=True)

    def _path(self, container: str) -> Path:
        return self._folder / f"{container}.json"


def _plain(spec: LaunchSpec, rule: LaunchRule) -> tuple[dict[str, str], Path]:
    """Environment and folder of an agent that is not hardened."""
    return {**clean_environment(), **rule.filled_environment(), **spec.agent_environment()}, rule.folder()


def _hardened(spec: LaunchSpec, rule: LaunchRule, folder: Path) -> tuple[dict[str, str], Path]:
    """Environment and folder of one that is: the folder is emptied, and its home. Raises OSError."""
    work = folder / "work"
    if work.is_dir() and not work.is_symlink():
        shutil.rmtree(work)
    else:
        work.unlink(missing_ok=True)
    work.mkdir(mode=0o700)
    clean = {"PATH": os.environ.get("PATH", os.defpath), "LANG": os.environ.get("LANG", "C.UTF-8")}
    own = {"HOME": str(work), "TMPDIR": str(work)}
    return {**clean, **rule.filled_environment(), **spec.agent_environment(), **own}, work


def _spawn(
    spec: LaunchSpec, rule: LaunchRule, environment: dict[str, str], place: Path, output: int, gate: int
) -> subprocess.Popen[bytes]:
    limits = rule.limits() if spec.hardened else None
    order = {"socket": gate, "limits": limits, "command": rule.filled_command()}
    try:
        return subprocess.Popen(  # noqa: S603  our own program
            [sys.executable, "-I", "-S", str(_RUNNER)],
            cwd=place,
            env={**environment, ORDER_VARIABLE: json.dumps(order)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(gate,),
            # A hardened one works below the data directory, another one in a folder of the user's.
            umask=PRIVATE_UMASK if spec.hardened else user_umask(),
        )
    except ValueError:
        # Its own words would quote what is in there.
        raise LaunchFailed(f"the environment of {spec.agent_name} cannot be passed on: a zero byte?") from None


def _let_go(gate: socket.socket, handle: str) -> None:
    """Let the command run, and wait until it does or has failed to. Raises LaunchFailed."""
    gate.settimeout(EXEC_S)
    try:
        gate.sendall(handle.encode("ascii"))
        gate.recv(1)
    except TimeoutError:
        raise LaunchFailed(f"the agent's process did not get as far as its command in {EXEC_S:.0f} s") from None
    except OSError:
        # It has ended, and its output says why.
        return


def _early_end(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(EARLY_END_S)
    except subprocess.TimeoutExpired:
        return None


def _failure(spec: LaunchSpec, code: int | None, log: Path, begin: int) -> str:
    how = f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"
    said = _last_line(log, begin, spec)
    return f"{spec.agent_name} ended at its start with {how}" + (f": {said}" if said else "")


def _last_line(log: Path, begin: int, spec: LaunchSpec) -> str:
    """The end of what this run has said, as one line that may be shown to anybody."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        first = file.seek(max(begin, size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    if first > begin:
        # A line whose beginning is missing may begin with the end of a token, which nobody would know.
        text = text.partition("\n")[2]
    lines = [line.strip() for line in spec.blanked(text).splitlines()]
    return escaped(next((line for line in reversed(lines) if line), ""))[:_QUOTED]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One start at a time in a container's folder. The lock ends with the process that holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _reap() -> None:
    for child in list(_children):
        if child.poll() is not None:
            with suppress(ValueError):
                _children.remove(child)


def _pid_of(handle: str) -> int | None:
    found = _HANDLE(handle)
    return None if found is None else int(found[1])


def _mark_of(pid: int) -> str | None:
    """The handle that a process bears in its environment."""
    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).environ().get(HANDLE_VARIABLE)
    return None


def _left_of(
    handles: Collection[str], known: Mapping[str, set[psutil.Process]]
) -> dict[str, set[psutil.Process]]:
    """What runs of each of these runs: what bears its mark, wherever it has gone, and all of its process
    session, so that one that has cleared its environment is found, too.

    A session's number may have come to others after its end. It is this run's when its first process leads
    it and bears the mark, or when one that bears it, or that was `known` to belong to it, is in it.
    """
    sessions = {pid: handle for handle in handles if (pid := _pid_of(handle)) is not None}
    found: dict[str, set[psutil.Process]] = {handle: set() for handle in sessions.values()}
    members: dict[str, set[psutil.Process]] = {handle: set() for handle in found}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process_handle(process.pid) is None:
                continue  # it is gone, or a zombie
            if (handle := sessions.get(os.getsid(process.pid))) is not None:
                members[handle].add(process)
            mark = process.environ().get(HANDLE_VARIABLE)
            if mark in found:
                found[mark].add(process)
    for handle, those in members.items():
        if those & (found[handle] | known.get(handle, set())):
            found[handle] |= those
    return found


def _end(handles: Collection[str], grace_s: float, *, is_noted: bool) -> int:
    """SIGTERM, at most `grace_s` seconds, SIGKILL, for all of these at once; of how many something was left.

    `is_noted`: they stand in our files, so that the first process is ours even if it bears no mark.
    """
    known: dict[str, set[psutil.Process]] = {}
    for handle in handles if is_noted else ():
        pid = _pid_of(handle)
        if pid is not None and process_handle(pid) == handle:
            with suppress(psutil.Error):
                known[handle] = {psutil.Process(pid)}
    known = _left_of(handles, known)
    count = sum(1 for those in known.values() if those)
    if grace_s > 0:
        _wait(_signal(known, signal.SIGTERM), grace_s)
    deadline = time.monotonic() + KILL_S
    while any((known := _left_of(handles, known)).values()):
        left = _signal(known, signal.SIGKILL)
        _wait(left, 1.0)
        if time.monotonic() > deadline and any(_left_of(handles, known).values()):
            raise TrunklineError(f"the agents' processes {sorted(p.pid for p in left)} do not end")
    return count


def _signal(those: Mapping[str, set[psutil.Process]], number: signal.Signals) -> list[psutil.Process]:
    found = [process for group in those.values() for process in group]
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(number)
    return found


def _wait(those: Collection[psutil.Process], timeout_s: float) -> None:
    """Wait until they have ended. A zombie has, however long its parent takes to ask for it."""
    deadline = time.monotonic() + timeout_s
    while any(process_handle(process.pid) and process.is_running() for process in those):
        if time.monotonic() > deadline:
            break
        time.sleep(_TICK_S)
    _reap()
