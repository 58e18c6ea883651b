"""The launcher that runs agents as processes of this machine (HH-05).

An agent leads a process session of its own and outlives the program that started it. Its token and its
addresses are only in its environment. `data_dir/agents/<container>/` has its output and, if it is hardened, its
working folder. `data_dir/run/agents/<container>.json` names what runs, so that another process can end it. The
handle is `process/<pid>/<start time>`, which is never used again.

Hardening limits the resources of an agent; it is no sandbox. The agent runs as the same user, who may read our
files, and root may raise its own limits again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from connectors.hub.launcher import hardening
from connectors.hub.launcher.hardening import HANDLE_VARIABLE, ORDER_VARIABLE
from connectors.hub.launcher.launch_spec import LAUNCHERS_FILE, LaunchFailed, LaunchRule, LaunchSpec, Started
from connectors.plumbing.machine import process_tree
from schemas.settings.settings import Settings
from trunkline_agent.private_files import PRIVATE_UMASK, replace_file, user_umask
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import is_name

# An agent that ends within this time with an exit code other than 0 has failed to start.
EARLY_END_S: Final = 0.3
# Normally 50 ms; the limit allows for a very busy machine.
EXEC_S: Final = 20.0
DOWN_GRACE_S: Final = 5.0
_QUOTED: Final = 300
_TAIL_BYTES: Final = 64 * 1024
_RUNNER: Final = Path(hardening.__file__)


class _Run(msgspec.Struct, frozen=True):
    """The content of a file in `run/agents`."""

    handle: str
    container: str
    task_id: str


class LocalProcessLauncher:
    """A launcher that runs agents as processes of this machine. Thread-safe.

    Several launchers in several processes may serve one data directory.

    Args:
        settings: The settings, from which the data directory is taken.
        rules: The command for each image, as `read_launchers` returned them.
    """

    def __init__(self, settings: Settings, rules: Mapping[str, LaunchRule]) -> None:
        self._rules = rules
        self._folder = settings.data_path / "agents"
        self._runs = _RunFiles(settings)
        self._host = process_tree.host_name()

    def start(self, spec: LaunchSpec) -> Started:
        """Start an agent in its container's folder, and return its handle when it has run for 0.3 s.

        While that agent runs, a second call for the same container and task starts no other one and returns the
        same handle. Calls for the same container wait for each other.

        Raises:
            LaunchFailed: The image has no rule, the container runs for another task, or the agent failed to
                start or ended within 0.3 s with an error. No process of the agent is left.
        """
        rule = self._rules.get(spec.image)
        if rule is None:
            raise LaunchFailed(f"no command for the image {escaped(spec.image)} in {LAUNCHERS_FILE}")
        if not is_name(spec.container):
            raise LaunchFailed("the container's name is not a valid name")
        process_tree.reap()
        try:
            for folder in (self._folder, self._folder / spec.container):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(self._folder / spec.container):
                handle = self._running(spec) or self._launch(spec, rule)
        except OSError as error:
            raise LaunchFailed(f"cannot start {spec.container}: {error.strerror or error}") from error
        return Started(handle, self._host)

    def alive(self, handle: str) -> bool:
        """Return whether the agent's first process still runs, whatever other processes it has started.

        `handle` is the one in the result of `start`. False also for a handle of another launcher. If no process
        of the agent is left, the file in `run/agents` that names the run is deleted.
        """
        process_tree.reap()
        first, run = process_tree.first_process(handle), self._runs.find(handle)
        if first is not None:
            return run is not None or process_tree.mark_of(first, HANDLE_VARIABLE) == handle
        if run is not None and not process_tree.ProcessTrees(HANDLE_VARIABLE, {handle: None}).find_all():
            self._runs.remove(run)
        return False

    def find(self, container: str) -> str | None:
        """Return the handle of the agent that was last started for a container. It may have ended (`alive`).

        None: no agent was started for the container, or the agent was stopped.
        """
        run = self._runs.of(container)
        return None if run is None else run.handle

    def stop(self, handle: str, grace_s: float) -> None:
        """End the agent and all processes that it has started, and wait until they have ended.

        Only processes are signalled that launchers of this data directory started, or that have the handle in
        their environment.

        Args:
            handle: The handle of the run. An ended run is no error.
            grace_s: How long the processes may take to end after SIGTERM, in seconds. 0: SIGKILL at once.

        Raises:
            TrunklineError: A process does not end.
        """
        run = self._runs.find(handle)
        _end([handle], grace_s, is_noted=run is not None)
        if run is not None:
            self._runs.remove(run)

    def _running(self, spec: LaunchSpec) -> str | None:
        run = self._runs.of(spec.container)
        if run is None or process_tree.first_process(run.handle) is None:
            return None
        if run.task_id != spec.task_id:
            raise LaunchFailed(f"{spec.container} already runs for another task")
        return run.handle

    def _launch(self, spec: LaunchSpec, rule: LaunchRule) -> str:
        """Start an agent. Its command waits until the file that names it is written. Raises OSError, too."""
        folder = self._folder / spec.container
        environment, place = _hardened(spec, rule, folder) if spec.hardened else _plain(spec, rule)
        if not place.is_dir():
            raise LaunchFailed(f"the working_dir of {escaped(spec.image)} in {LAUNCHERS_FILE} is not a folder")
        ours, theirs = socket.socketpair()
        with process_tree.open_private_log(folder / "output.log", os.O_NOFOLLOW) as output, ours:
            begin = output.seek(0, os.SEEK_END)
            limits = rule.limits() if spec.hardened else None
            order = {"socket": theirs.fileno(), "limits": limits, "command": rule.filled_command()}
            try:
                with theirs:
                    child = process_tree.start_process(
                        [sys.executable, "-I", "-S", _RUNNER],
                        cwd=place,
                        environment={**environment, ORDER_VARIABLE: json.dumps(order)},
                        output=output,
                        pass_fds=(theirs.fileno(),),
                        # A hardened agent works below the data directory, any other in a folder of the user's.
                        umask=PRIVATE_UMASK if spec.hardened else user_umask(),
                    )
            except ValueError:
                # The error's own text would quote the environment.
                raise LaunchFailed(
                    f"the environment of {spec.agent_name} cannot be passed on: a zero byte?"
                ) from None
            handle = process_tree.process_handle(child.pid)
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
        """Leave nothing of a start that has failed."""
        if child.poll() is None:
            child.kill()
            child.wait(process_tree.KILL_S)
        if handle is not None:
            self.stop(handle, 0.0)


def stop_all(settings: Settings, grace_s: float = DOWN_GRACE_S) -> int:
    """End all agents of this data directory, whichever launcher started them, and return how many still ran.

    The command `down` calls it after it has ended all programs that could start another agent. It blocks until
    all agents have ended.

    Args:
        settings: The settings, from which the data directory is taken.
        grace_s: How long the agents may take to end after SIGTERM, in seconds. Then they get SIGKILL.

    Raises:
        TrunklineError: An agent does not end within about 5 seconds after SIGKILL.
    """
    process_tree.reap()
    files = _RunFiles(settings)
    runs = files.read()
    count = _end([run.handle for run in runs], grace_s, is_noted=True)
    for run in runs:
        files.remove(run)
    return count


class _RunFiles:
    """The files that name the running agents, one for each container."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.data_path / "run" / "agents"

    def write(self, run: _Run) -> None:
        """Write the file of a container in one step. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(self._path(run.container), msgspec.json.encode(run))

    def of(self, container: str) -> _Run | None:
        """Return the run in a container's file, or None if there is no valid file."""
        try:
            found = msgspec.json.decode(self._path(container).read_bytes(), type=_Run)
        except (OSError, ValueError, RecursionError):
            return None
        return found if found.container == container else None

    def read(self) -> list[_Run]:
        """Return the runs in all files."""
        names = [path.name for path in self._folder.glob("[!.]*.json")]
        return [run for name in sorted(names) if (run := self.of(name.removesuffix(".json"))) is not None]

    def find(self, handle: str) -> _Run | None:
        """Return the run with this handle."""
        return next((run for run in self.read() if run.handle == handle), None)

    def remove(self, run: _Run) -> None:
        """Remove the file of a run, unless the container has another run by now."""
        if self.of(run.container) == run:
            self._path(run.container).unlink(missing_ok=True)

    def _path(self, container: str) -> Path:
        return self._folder / f"{container}.json"


def _plain(spec: LaunchSpec, rule: LaunchRule) -> tuple[dict[str, str], Path]:
    """Return the environment and the folder of an agent that is not hardened."""
    environment = {**process_tree.clean_environment(), **rule.filled_environment(), **spec.agent_environment()}
    return environment, rule.folder()


def _hardened(spec: LaunchSpec, rule: LaunchRule, folder: Path) -> tuple[dict[str, str], Path]:
    """Return the environment and the folder of a hardened agent.

    Empties the folder, which is also the agent's home. Raises OSError.
    """
    work = folder / "work"
    if work.is_dir() and not work.is_symlink():
        shutil.rmtree(work)
    else:
        work.unlink(missing_ok=True)
    work.mkdir(mode=0o700)
    clean = {"PATH": os.environ.get("PATH", os.defpath), "LANG": os.environ.get("LANG", "C.UTF-8")}
    own = {"HOME": str(work), "TMPDIR": str(work)}
    return {**clean, **rule.filled_environment(), **spec.agent_environment(), **own}, work


def _let_go(gate: socket.socket, handle: str) -> None:
    """Let the command run, and wait until it runs or has failed to. Raises LaunchFailed."""
    gate.settimeout(EXEC_S)
    try:
        gate.sendall(handle.encode("ascii"))
        gate.recv(1)
    except TimeoutError:
        raise LaunchFailed(f"the agent's process did not reach its command within {EXEC_S:.0f} s") from None
    except OSError:
        # The process has ended, and its output says why.
        return


def _early_end(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(EARLY_END_S)
    except subprocess.TimeoutExpired:
        return None


def _failure(spec: LaunchSpec, code: int | None, log: Path, begin: int) -> str:
    how = f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"
    last = _last_line(log, begin, spec)
    return f"{spec.agent_name} ended at its start with {how}" + (f": {last}" if last else "")


def _last_line(log: Path, begin: int, spec: LaunchSpec) -> str:
    """Return the last line of this run's output, without secrets and safe to display."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        first = file.seek(max(begin, size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    if first > begin:
        # An incomplete first line may begin with the end of a token, which could not be recognised.
        text = text.partition("\n")[2]
    lines = [line.strip() for line in spec.blanked(text).splitlines()]
    return escaped(next((line for line in reversed(lines) if line), ""))[:_QUOTED]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Allow one start at a time in a container's folder. The kernel releases the lock with its process."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _end(handles: Collection[str], grace_s: float, *, is_noted: bool) -> int:
    """End all these runs at once, and return of how many a process was left.

    `is_noted`: our files name them, so the first process is ours even without the mark in its environment.
    """
    first = {handle: process_tree.first_process(handle) if is_noted else None for handle in handles}
    trees = process_tree.ProcessTrees(HANDLE_VARIABLE, first)
    count = sum(bool(processes) for processes in trees.find().values())
    process_tree.end_processes(trees.find_all, grace_s)
    return count
