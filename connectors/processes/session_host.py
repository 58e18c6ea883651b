"""Runs agent sessions on this machine (JE-14): each in a tmux session where tmux is there, else in a process
group.

A handle names one run for ever: `tmux/<socket>/<name>` (the name ends with random digits) or
`process/<pid>/<start time>`. What a handle named once and is gone never comes back, so nothing else is ever
ended by mistake. Command, environment and secrets go through a 0600 spec file, never through arguments.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from connectors.processes.session_runner import (
    HANDLE_VARIABLE,
    PROCESS,
    SessionEnd,
    SessionSpec,
    end_file,
    process_handle,
    release_file,
)
from schemas.errors import NotFound, TrunklineError
from schemas.keys.umask import user_umask
from schemas.settings.settings import PROJECT_ROOT, Settings

TMUX: Final = "tmux"
_RUNNER: Final = "connectors.processes.session_runner"
# Sessions outlive an upgrade, and the runner was at another place before.
_RUNNERS: Final = frozenset({_RUNNER, "connectors.session_runner"})
GRACE_S: Final = 10.0
# What an agent has to end by itself after its job has ended: its last receipt may be on the way.
OWN_END_S: Final = 3.0
KILL_S: Final = 5.0
_TMUX_S: Final = 10.0
_SCREEN: Final = ("-x", "200", "-y", "50")
_SERVER_ENDED: Final = "server exited"
_START_ATTEMPTS: Final = 5
_START_AGAIN_S: Final = 0.1
_CAPTURED_LINES: Final = 2000
_CAPTURED_BYTES: Final = 256 * 1024
_LOG_BYTES: Final = 16 * 1024 * 1024
# Started by this process and not waited for; asked now and then, so that they do not stay as zombies.
_children: Final[list[subprocess.Popen[bytes]]] = []


def host_name() -> str:
    """This machine's name as the registry writes it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    return name[:128] or "localhost"


def clean_environment() -> dict[str, str]:
    """The environment of a session's command: ours, without our tokens, secrets, settings and terminal."""
    ours = ("TRUNKLINE", "MQTT_", "TMUX")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class SessionHost:
    """Starts, looks at and ends the sessions that run on this machine for one data directory.

    `use_tmux` None: where tmux is there. All methods raise TrunklineError when tmux or the disk fails.
    """

    def __init__(self, settings: Settings, *, use_tmux: bool | None = None) -> None:
        self._folder = settings.data_path / "sessions"
        digest = hashlib.sha256(str(settings.data_path).encode()).hexdigest()
        self._socket = f"trunkline-{digest[:8]}"
        self._use_tmux = shutil.which(TMUX) is not None if use_tmux is None else use_tmux
        self.name = host_name()

    def folder(self, session: str) -> Path:
        """Where a session's spec, screen log, captures and end are kept."""
        return self._folder / session

    def prepare(
        self,
        session: str,
        command: Sequence[str],
        *,
        folder: Path,
        environment: dict[str, str],
        instructions: str | None = None,
    ) -> Path:
        """Write what a session is to run and return where. Each time a file of its own: two who take one name
        at once do not run each other's. It stays for a resume after `keep`, until `forget`. The command runs
        with the umask of the user of this process.
        """
        spec = SessionSpec(session, list(command), str(folder), environment, instructions, user_umask())
        path = self.folder(session) / f"spec-{secrets.token_hex(8)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(spec))
        except OSError as error:
            raise TrunklineError(f"cannot keep the session's spec in {path}: {error.strerror}") from error
        return path

    def keep(self, session: str, spec: Path) -> None:
        """Make what `prepare` wrote the session's own: to be called when the registry has taken the session."""
        kept = self._spec(session)
        draft = kept.with_name(f".{spec.name}")
        try:
            draft.symlink_to(spec.name)
            draft.replace(kept)
        except OSError as error:
            raise TrunklineError(f"cannot keep the session's spec in {kept}: {error.strerror}") from error

    def is_prepared(self, session: str) -> bool:
        """Whether `start` knows what to run."""
        return self._spec(session).exists()

    def start(self, session: str, spec: Path | None = None) -> str:
        """Start what `prepare` wrote to `spec`, None: what was kept, and return its handle. The command itself
        begins with `release`, so that the registry knows the session before it does anything; without it, it
        ends after a minute. Raises NotFound when nothing was kept.
        """
        if spec is None:
            if not self.is_prepared(session):
                raise NotFound(f"session {session} was not started on this machine, or has nothing to run")
            spec = self._spec(session).resolve()
        log = self._log(session)
        with suppress(OSError):
            if log.stat().st_size > _LOG_BYTES:
                log.replace(log.with_name(log.name + ".1"))
        return self._start_tmux(session, spec) if self._use_tmux else self._start_process(session, spec)

    def release(self, session: str, handle: str) -> None:
        """Let the command of this run begin."""
        release_file(self._spec(session), handle).touch(0o600)

    def alive(self, handle: str) -> bool:
        """Whether what the handle names still runs here."""
        for child in _children:
            child.poll()
        if _pid_of(handle) is not None:
            return _leads(handle)
        name = self._tmux_name(handle)
        return name is not None and name in self._tmux_sessions()

    def left_of(self, handles: Collection[str]) -> set[str]:
        """Which of these runs have something left here: one look at everything, however many are asked for."""
        names = self._tmux_sessions() if any(self._tmux_name(handle) for handle in handles) else set()
        found = {handle for handle in handles if self._tmux_name(handle) in names or _leads(handle)}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                mark = process.environ().get(HANDLE_VARIABLE)
                if mark is not None and mark in handles and mark not in found and _runs(process):
                    found.add(mark)
        return found

    def running(self) -> dict[str, str]:
        """Return the session names of the runs of this data directory on this machine, by handle."""
        found: dict[str, str] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                words = process.cmdline()
                if _RUNNERS.isdisjoint(words[:-2]) or Path(words[-2]).parent.parent != self._folder:
                    continue
                handle = process_handle(process.pid) if words[-1] == PROCESS else words[-1]
                if handle is not None and _runs(process):
                    found[handle] = Path(words[-2]).parent.name
        return found

    def send(self, handle: str, number: signal.Signals) -> list[psutil.Process]:
        """Send a signal to what the handle names and all that it started; these, also where another user's
        are not ours to signal.
        """
        found = self._processes(handle)
        for process in found:
            with suppress(psutil.Error):
                process.send_signal(number)
        return found

    def stop(self, handle: str, *, grace_s: float = 0.0) -> bool:
        """End what the handle names and all that it started: SIGTERM, at most `grace_s` seconds, SIGKILL.

        Returns whether anything was left to end. Without grace it is killed at once. Raises TrunklineError
        when something does not end, such as what runs as another user.
        """
        had_any = False
        if grace_s > 0:
            found = self.send(handle, signal.SIGTERM)
            had_any = bool(found)
            psutil.wait_procs(found, timeout=grace_s)
        deadline = time.monotonic() + KILL_S
        while left := self.send(handle, signal.SIGKILL):
            had_any = True
            psutil.wait_procs(left, timeout=1.0)
            for child in _children:
                child.poll()
            if time.monotonic() > deadline and (left := self._processes(handle)):
                raise TrunklineError(f"{handle}: processes {sorted(p.pid for p in left)} do not end")
        if had_any and (name := self._tmux_name(handle)) is not None and shutil.which(TMUX) is not None:
            self._tmux("kill-session", "-t", f"={name}", check=False)
        return had_any

    def capture(self, session: str, handle: str | None) -> str:
        """What stands on the session's screen, or the end of its log when the screen is gone.

        The log is of one run or several: `start` puts one that has grown too large aside. Nothing bounds it
        while a run goes on.
        """
        name = None if handle is None else self._tmux_name(handle)
        if handle is not None and name is not None and self.alive(handle):
            where = ("-t", f"={name}:", "-S", str(-_CAPTURED_LINES))
            return self._tmux("capture-pane", "-p", "-J", *where).stdout.rstrip("\n") + "\n"
        try:
            with self._log(session).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _CAPTURED_BYTES))
                return log.read(_CAPTURED_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def keep_capture(self, session: str, handle: str | None, capture_id: str) -> Path:
        """Write `capture` into a file of the session's folder and return it."""
        path = self.folder(session) / "captures" / f"{capture_id}.txt"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(self.capture(session, handle), encoding="utf-8")
        return path

    def end_of(self, session: str, handle: str) -> SessionEnd | None:
        """How the command of this run ended; None when it has not, or was killed with all that ran it."""
        try:
            found = msgspec.json.decode(end_file(self._spec(session)).read_bytes(), type=SessionEnd)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return found if found.handle == handle else None

    def forget(self, session: str) -> None:
        """Remove what was prepared: the session will not be resumed. Log and captures stay."""
        for spec in self.folder(session).glob("spec*.json"):
            spec.unlink(missing_ok=True)

    def _spec(self, session: str) -> Path:
        return self.folder(session) / "spec.json"

    def _log(self, session: str) -> Path:
        return self.folder(session) / "screen.log"

    def _start_process(self, session: str, spec: Path) -> str:
        fd = os.open(self._log(session), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "ab") as log:
            child = subprocess.Popen(  # noqa: S603  the command is ours
                [sys.executable, "-m", _RUNNER, str(spec), PROCESS],
                cwd=PROJECT_ROOT,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _children.append(child)
        handle = process_handle(child.pid)
        if handle is None:
            raise TrunklineError(f"session {session} ended at its start; see {self._log(session)}")
        return handle

    def _start_tmux(self, session: str, spec: Path) -> str:
        # tmux takes neither dots nor colons in a name.
        name = f"{session.replace('.', '_')}-{secrets.token_hex(4)}"
        handle = f"{TMUX}/{self._socket}/{name}"
        start = ("new-session", "-d", "-s", name, *_SCREEN, "-c", str(PROJECT_ROOT), "--")
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._tmux(*start, sys.executable, "-m", _RUNNER, str(spec), handle)
                break
            except TrunklineError as error:
                # The server ends with its last session, and may do so while we ask it; then it has made none.
                if _SERVER_ENDED not in str(error) or attempt == _START_ATTEMPTS:
                    raise
                time.sleep(_START_AGAIN_S)
        keep = f"umask 077; exec cat >> {shlex.quote(str(self._log(session)))}"
        self._tmux("pipe-pane", "-t", f"={name}:", keep)
        return handle

    def _tmux_sessions(self) -> set[str]:
        """The names of all sessions behind our socket."""
        if shutil.which(TMUX) is None:
            return set()
        done = self._tmux("list-sessions", "-F", "#{session_name}", check=False)
        return set(done.stdout.split()) if done.returncode == 0 else set()

    def _tmux(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # Without the user's own configuration, in the default folder of sockets, and with an environment
        # that the server may pass on.
        command = [TMUX, "-L", self._socket, "-f", os.devnull, *arguments]
        try:
            done = subprocess.run(  # noqa: S603  no shell, names checked
                command,
                env=clean_environment(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TMUX_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TrunklineError(f"tmux {arguments[0]}: {type(error).__name__}") from error
        if check and done.returncode != 0:
            raise TrunklineError(f"tmux {arguments[0]}: {done.stderr.strip() or done.returncode}")
        return done

    def _processes(self, handle: str) -> list[psutil.Process]:
        """Whatever belongs to a run: its first process with all below it, and all that bear its mark."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.Error):
            root = self._root(handle)
            if root is not None:
                found = {process.pid: process for process in (root, *root.children(recursive=True))}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(HANDLE_VARIABLE) == handle:
                    found[process.pid] = process
        return [process for process in found.values() if _runs(process)]

    def _root(self, handle: str) -> psutil.Process | None:
        pid = _pid_of(handle)
        if pid is None:
            name = self._tmux_name(handle)
            if name is None or not self.alive(handle):
                return None
            shown = self._tmux("display-message", "-p", "-t", f"={name}:", "#{pane_pid}", check=False)
            return psutil.Process(int(shown.stdout)) if shown.stdout.strip().isdigit() else None
        if process_handle(pid) != handle:
            return None
        found = psutil.Process(pid)
        # Handles come from the registry, where others write, too: only what we started is ours to end.
        return None if _RUNNERS.isdisjoint(found.cmdline()) else found

    def _tmux_name(self, handle: str) -> str | None:
        """The tmux session in a handle; None unless it lies behind our own socket."""
        prefix = f"{TMUX}/{self._socket}/"
        return handle.removeprefix(prefix) if handle.startswith(prefix) else None


def _pid_of(handle: str) -> int | None:
    kind, _, rest = handle.partition("/")
    pid = rest.partition("/")[0]
    return int(pid) if kind == PROCESS and pid.isascii() and pid.isdigit() and len(pid) < 10 else None


def _leads(handle: str) -> bool:
    """Whether the first process of a process group's handle runs."""
    pid = _pid_of(handle)
    return pid is not None and process_handle(pid) == handle


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        # It is there, and not ours to look at.
        return True
