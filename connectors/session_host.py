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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from connectors.session_runner import (
    HANDLE_VARIABLE,
    PROCESS,
    SessionEnd,
    SessionSpec,
    end_file,
    process_handle,
    release_file,
)
from schemas.errors import NotFound, TrunklineError
from schemas.settings import PROJECT_ROOT, Settings

TMUX: Final = "tmux"
_RUNNER: Final = "connectors.session_runner"
GRACE_S: Final = 10.0
# What an agent has to end by itself after its job has ended: its last receipt may be on the way.
OWN_END_S: Final = 3.0
_KILL_S: Final = 5.0
_TMUX_S: Final = 10.0
_SCREEN: Final = ("-x", "200", "-y", "50")
_CAPTURED_LINES: Final = 2000
_CAPTURED_BYTES: Final = 256 * 1024
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
    ) -> None:
        """Keep what a session runs, for `start`; it stays for a resume until `forget`."""
        spec = SessionSpec(session, list(command), str(folder), environment, instructions)
        path = self._spec(session)
        draft = path.with_name(f".spec.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(spec))
            draft.replace(path)
        except OSError as error:
            raise TrunklineError(f"cannot keep the session's spec in {path}: {error.strerror}") from error

    def is_prepared(self, session: str) -> bool:
        """Whether `start` knows what to run."""
        return self._spec(session).exists()

    def start(self, session: str) -> str:
        """Start what was prepared and return its handle. The command itself begins with `release`, so that
        the registry knows the session before it does anything; without it, it ends after a minute.
        """
        if not self.is_prepared(session):
            raise NotFound(f"session {session} was not started on this machine, or has nothing to run")
        end_file(self._spec(session)).unlink(missing_ok=True)
        return self._start_tmux(session) if self._use_tmux else self._start_process(session)

    def release(self, session: str, handle: str) -> None:
        """Let the command of this run begin."""
        release_file(self._spec(session), handle).touch(0o600)

    def alive(self, handle: str) -> bool:
        """Whether what the handle names still runs here."""
        for child in _children:
            child.poll()
        pid = _pid_of(handle)
        if pid is not None:
            return process_handle(pid) == handle
        name = self._tmux_name(handle)
        if name is None or shutil.which(TMUX) is None:
            return False
        done = self._tmux("list-sessions", "-F", "#{session_name}", check=False)
        return done.returncode == 0 and name in done.stdout.split()

    def stop(self, handle: str, *, grace_s: float = 0.0) -> bool:
        """End what the handle names and all that it started: SIGTERM, at most `grace_s` seconds, SIGKILL.

        Returns whether anything was left to end. Without grace it is killed at once.
        """
        found = self._processes(handle)
        had_any = bool(found)
        if grace_s > 0:
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGTERM)
            psutil.wait_procs(found, timeout=grace_s)
        deadline = time.monotonic() + _KILL_S
        while left := self._processes(handle):
            had_any = True
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
            for child in _children:
                child.poll()
            if time.monotonic() > deadline:
                raise TrunklineError(f"{handle}: processes {sorted(p.pid for p in left)} do not end")
        if had_any and (name := self._tmux_name(handle)) is not None and shutil.which(TMUX) is not None:
            self._tmux("kill-session", "-t", f"={name}", check=False)
        return had_any

    def capture(self, session: str, handle: str | None) -> str:
        """What stands on the session's screen, or the end of its log when the screen is gone."""
        name = None if handle is None else self._tmux_name(handle)
        if handle is not None and name is not None and self.alive(handle):
            where = ("-t", f"={name}:", "-S", str(-_CAPTURED_LINES))
            return self._tmux("capture-pane", "-p", "-J", *where).stdout.rstrip("\n") + "\n"
        try:
            log = self._log(session).read_bytes()
        except FileNotFoundError:
            return ""
        return log[-_CAPTURED_BYTES:].decode("utf-8", "replace")

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
        self._spec(session).unlink(missing_ok=True)

    def _spec(self, session: str) -> Path:
        return self.folder(session) / "spec.json"

    def _log(self, session: str) -> Path:
        return self.folder(session) / "screen.log"

    def _runner(self, session: str, handle: str) -> list[str]:
        return [sys.executable, "-m", _RUNNER, str(self._spec(session)), handle]

    def _start_process(self, session: str) -> str:
        fd = os.open(self._log(session), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "ab") as log:
            child = subprocess.Popen(  # noqa: S603  the command is ours
                self._runner(session, PROCESS),
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

    def _start_tmux(self, session: str) -> str:
        # tmux takes neither dots nor colons in a name.
        name = f"{session.replace('.', '_')}-{secrets.token_hex(4)}"
        handle = f"{TMUX}/{self._socket}/{name}"
        start = ("new-session", "-d", "-s", name, *_SCREEN, "-c", str(PROJECT_ROOT), "--")
        self._tmux(*start, *self._runner(session, handle))
        keep = f"umask 077; exec cat >> {shlex.quote(str(self._log(session)))}"
        self._tmux("pipe-pane", "-t", f"={name}:", keep)
        return handle

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
        return found if _RUNNER in found.cmdline() else None

    def _tmux_name(self, handle: str) -> str | None:
        """The tmux session in a handle; None unless it lies behind our own socket."""
        prefix = f"{TMUX}/{self._socket}/"
        return handle.removeprefix(prefix) if handle.startswith(prefix) else None


def _pid_of(handle: str) -> int | None:
    kind, _, rest = handle.partition("/")
    pid = rest.partition("/")[0]
    return int(pid) if kind == PROCESS and pid.isascii() and pid.isdigit() and len(pid) < 10 else None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
