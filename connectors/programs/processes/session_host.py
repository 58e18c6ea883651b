"""Runs agent sessions on this machine (JE-14), in tmux if it is installed, else as process trees.

A session may be started several times; each start is a run. A handle names one run and is never used again:
`tmux/<socket>/<name>` (the name ends with random digits) or `process/<pid>/<start time>`. The run's first
process is a wrapper (session_runner.py), which runs the session's command and stores its exit code. Command,
environment and secrets are passed in a file with mode 0600, never in arguments.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from connectors.plumbing.machine import process_tree
from connectors.programs.processes.session_runner import (
    HANDLE_VARIABLE,
    SessionEnd,
    SessionSpec,
    end_file,
    release_file,
)
from schemas.settings.settings import PROJECT_ROOT, Settings
from trunkline_agent.errors import NotFound, TrunklineError
from trunkline_agent.private_files import replace_file, user_umask

TMUX: Final = "tmux"
_RUNNER: Final = "connectors.programs.processes.session_runner"
GRACE_S: Final = 10.0
# How long an agent may take to end by itself after its job has ended: its last receipt may be on the way.
OWN_END_S: Final = 3.0
_TMUX_S: Final = 10.0
_SCREEN: Final = ("-x", "200", "-y", "50")
_SERVER_ENDED: Final = "server exited"
_START_ATTEMPTS: Final = 5
_START_AGAIN_S: Final = 0.1
_CAPTURED_LINES: Final = 2000
_CAPTURED_BYTES: Final = 256 * 1024
_LOG_BYTES: Final = 16 * 1024 * 1024


class SessionHost:
    """The sessions that run on this machine for one data directory.

    Each start of a session is a run. Its first process is a wrapper, which runs the session's command and
    stores the exit code. `start` returns the handle of the run, and the registry of sessions stores it. All
    methods with a `handle` take this text. Methods raise TrunklineError if tmux fails or does not answer within
    10 s.

    Args:
        settings: the settings, from which the data directory is taken.
        use_tmux: whether new runs use tmux. None: they use tmux if it is installed.

    Attributes:
        name: this machine's name in the registries.
    """

    def __init__(self, settings: Settings, *, use_tmux: bool | None = None) -> None:
        self._folder = settings.data_path / "sessions"
        digest = hashlib.sha256(str(settings.data_path).encode()).hexdigest()
        self._socket = f"trunkline-{digest[:8]}"
        self._use_tmux = shutil.which(TMUX) is not None if use_tmux is None else use_tmux
        self.name = process_tree.host_name()

    def folder(self, session: str) -> Path:
        """Return the path of a session's folder, with its command, screen log, captures and exit code.

        The folder may not exist yet.
        """
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
        """Write the command of a session to a new file of mode 0600, and return its path.

        Each call makes a file of its own, so two callers that want one name do not run each other's command.
        After `keep`, the file stays for a resume until `forget`. The command runs with the umask of the user of
        this process.

        Args:
            session: the session's name.
            command: the program and its arguments.
            folder: the folder in which the command runs.
            environment: the whole environment of the command.
            instructions: the text on the command's standard input. None: its standard input is the terminal of
                tmux, or empty without tmux.

        Raises:
            TrunklineError: the file cannot be written.
        """
        spec = SessionSpec(session, list(command), str(folder), environment, instructions, user_umask())
        path = self.folder(session) / f"spec-{secrets.token_hex(8)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(path, msgspec.json.encode(spec))
        except OSError as error:
            raise TrunklineError(f"cannot write the session's command to {path}: {error.strerror}") from error
        return path

    def keep(self, session: str, spec: Path) -> None:
        """Make a file from `prepare` the session's kept command, which `start` runs when no file is given.

        An earlier kept command is replaced. Call it after the registry has accepted the session.

        Raises:
            TrunklineError: the session's folder cannot be written.
        """
        kept = self._spec(session)
        draft = kept.with_name(f".{spec.name}")
        try:
            draft.symlink_to(spec.name)
            draft.replace(kept)
        except OSError as error:
            raise TrunklineError(f"cannot write the session's command to {kept}: {error.strerror}") from error

    def is_prepared(self, session: str) -> bool:
        """Return whether this machine has a kept command for the session, so that `start` can run it."""
        return self._spec(session).exists()

    def kept(self) -> list[str]:
        """Return the names of the sessions whose kept command is on this machine, in no order."""
        return [found.parent.name for found in self._folder.glob("*/spec.json")]

    def start(self, session: str, spec: Path | None = None) -> str:
        """Start the wrapper process of a session's command, and return the handle of this run.

        The wrapper waits for `release` before it runs the command. So the registry knows the session before the
        command does anything. Without `release`, the wrapper ends after a minute.

        Args:
            session: the session's name.
            spec: a file from `prepare`. `start` does not keep it: call `keep` for a later resume. None: run the
                session's kept command again, which is the file of the last `keep`.

        Raises:
            NotFound: this machine has no kept command for the session.
            TrunklineError: tmux failed, or the wrapper ended at once.
        """
        if spec is None:
            if not self.is_prepared(session):
                raise NotFound(f"session {session} was not started on this machine, or has no command")
            spec = self._spec(session).resolve()
        log = self._log(session)
        with suppress(OSError):
            if log.stat().st_size > _LOG_BYTES:
                log.replace(log.with_name(log.name + ".1"))
        return self._start_tmux(session, spec) if self._use_tmux else self._start_process(session, spec)

    def release(self, session: str, handle: str) -> None:
        """Let the wrapper that `start` has started run the session's command. Return at once.

        Call it when the registry has stored `handle`, the result of `start`.
        """
        release_file(self._spec(session), handle).touch(0o600)

    def alive(self, handle: str) -> bool:
        """Return whether the wrapper process of this run still runs on this machine.

        False also for a handle of another machine. Other processes of an ended run may still run (`left_of`).
        """
        process_tree.reap()
        return handle in self._first_alive([handle])

    def left_of(self, handles: Collection[str]) -> set[str]:
        """Return the part of `handles` whose runs still have a process on this machine, whichever it is.

        The call looks once at all processes of the machine, however many handles there are.
        """
        found = self._first_alive(handles)
        trees = process_tree.ProcessTrees(HANDLE_VARIABLE, dict.fromkeys(set(handles) - found)).find()
        return found | {handle for handle, processes in trees.items() if processes}

    def _first_alive(self, handles: Collection[str]) -> set[str]:
        """Return the runs whose first process still runs here."""
        names, first = self._tmux_sessions(handles), process_tree.first_process
        return {handle for handle in handles if first(handle) is not None or self._tmux_name(handle) in names}

    def running(self) -> dict[str, str]:
        """Return the runs of this data directory whose wrapper process still runs on this machine.

        The result maps the run's handle to the session's name.
        """
        found: dict[str, str] = {}
        for process in process_tree.running_processes():
            with suppress(psutil.Error, OSError):
                words = process.cmdline()
                if _RUNNER not in words[:-2] or Path(words[-2]).parent.parent != self._folder:
                    continue
                handle: str | None = words[-1]
                if handle == process_tree.PROCESS:
                    handle = process_tree.process_handle(process.pid)
                if handle is not None:
                    found[handle] = Path(words[-2]).parent.name
        return found

    def send(self, handle: str, number: signal.Signals) -> set[psutil.Process]:
        """Send signal `number` to all processes of a run, and return these processes without waiting.

        The result includes processes of other users, which this process may not signal. It is empty if no
        process of the run exists.
        """
        found = self._tree(handle).find_all()
        process_tree.send_signal(found, number)
        return found

    def stop(self, handle: str, *, grace_s: float = 0.0) -> bool:
        """End all processes of a session's run, and wait until they have ended.

        The call blocks for `grace_s` plus about 5 seconds at most.

        Args:
            handle: the handle of the run. A run that has ended is no error.
            grace_s: how long the processes may take to end after SIGTERM, in seconds. 0: SIGKILL at once.

        Returns:
            True: processes were ended. False: no process of the run existed.

        Raises:
            TrunklineError: a process does not end, for example because it runs as another user.
        """
        try:
            had_any = bool(process_tree.end_processes(self._tree(handle).find_all, grace_s))
        except TrunklineError as error:
            raise TrunklineError(f"{handle}: {error}") from None
        if had_any and (name := self._tmux_name(handle)) is not None and shutil.which(TMUX) is not None:
            self._tmux("kill-session", "-t", f"={name}", check=False)
        return had_any

    def capture(self, session: str, handle: str | None) -> str:
        """Return the text on a session's screen, or the end of its log.

        A session runs once or several times: after its end it may be resumed. The end of the log is returned
        if the run is not in tmux or has ended. The result is empty if there is no log. All runs of a session
        write to the same log. A log that has grown too large is put aside when the next run starts.

        Args:
            session: the session's name.
            handle: the run whose screen is wanted. None: the end of the log.
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
        """Write the text on a session's screen to a file in its folder, and return the file's path.

        The file is `captures/<capture_id>.txt`; the caller has checked that `capture_id` is a valid name. The
        file has the text that `capture` returns: without a screen, the end of the session's log.

        Raises:
            OSError: the file cannot be written.
        """
        path = self.folder(session) / "captures" / f"{capture_id}.txt"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(self.capture(session, handle), encoding="utf-8")
        return path

    def end_of(self, session: str, handle: str) -> SessionEnd | None:
        """Return the stored exit code of the session's command in the run `handle`.

        None means that none is stored for this run. If `alive` returns True for `handle`, the command still
        runs. Otherwise, the wrapper process was killed before it stored the code, or a later run has replaced
        it.
        """
        try:
            found = msgspec.json.decode(end_file(self._spec(session)).read_bytes(), type=SessionEnd)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return found if found.handle == handle else None

    def forget(self, session: str) -> None:
        """Delete the files with the command line of a session that will not be resumed. Its log stays."""
        for spec in self.folder(session).glob("spec*.json"):
            spec.unlink(missing_ok=True)

    def _spec(self, session: str) -> Path:
        return self.folder(session) / "spec.json"

    def _log(self, session: str) -> Path:
        return self.folder(session) / "screen.log"

    def _start_process(self, session: str, spec: Path) -> str:
        with process_tree.open_private_log(self._log(session)) as log:
            child = process_tree.start_process(
                [sys.executable, "-m", _RUNNER, spec, process_tree.PROCESS],
                cwd=PROJECT_ROOT,
                environment=process_tree.clean_environment(),
                output=log,
            )
        handle = process_tree.process_handle(child.pid)
        if handle is None:
            raise TrunklineError(f"session {session} ended at its start; see {self._log(session)}")
        return handle

    def _start_tmux(self, session: str, spec: Path) -> str:
        # tmux allows neither dots nor colons in a name.
        name = f"{session.replace('.', '_')}-{secrets.token_hex(4)}"
        handle = f"{TMUX}/{self._socket}/{name}"
        start = ("new-session", "-d", "-s", name, *_SCREEN, "-c", str(PROJECT_ROOT), "--")
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._tmux(*start, sys.executable, "-m", _RUNNER, str(spec), handle)
                break
            except TrunklineError as error:
                # The server ends with its last session. If it ends during this request, it has started nothing.
                if _SERVER_ENDED not in str(error) or attempt == _START_ATTEMPTS:
                    raise
                time.sleep(_START_AGAIN_S)
        keep = f"umask 077; exec cat >> {shlex.quote(str(self._log(session)))}"
        # tmux expands its formats and those of strftime(3) in this argument.
        self._tmux("pipe-pane", "-t", f"={name}:", keep.replace("#", "##").replace("%", "%%"))
        return handle

    def _tmux_sessions(self, handles: Collection[str]) -> set[str]:
        """Return the names of all sessions behind our socket, if one of the handles is such a session's."""
        if all(self._tmux_name(handle) is None for handle in handles) or shutil.which(TMUX) is None:
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
                env=process_tree.clean_environment(),
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

    def _tree(self, handle: str) -> process_tree.ProcessTrees:
        return process_tree.ProcessTrees(HANDLE_VARIABLE, {handle: self._first(handle)})

    def _first(self, handle: str) -> psutil.Process | None:
        """Return the first process of a run, None unless this host started it and it still runs."""
        with suppress(psutil.Error):
            if process_tree.handle_pid(handle) is not None:
                found = process_tree.first_process(handle)
                # Other programs write handles to the registry, too. Only a wrapper of ours may be ended.
                return None if found is None or _RUNNER not in found.cmdline() else found
            name = self._tmux_name(handle)
            if name is not None and self.alive(handle):
                shown = self._tmux("display-message", "-p", "-t", f"={name}:", "#{pane_pid}", check=False)
                return psutil.Process(int(shown.stdout)) if shown.stdout.strip().isdigit() else None
        return None

    def _tmux_name(self, handle: str) -> str | None:
        """Return the tmux session in a handle, or None if the handle is of another socket or kind."""
        prefix = f"{TMUX}/{self._socket}/"
        return handle.removeprefix(prefix) if handle.startswith(prefix) else None
