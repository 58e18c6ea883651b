"""Sessions of real processes for tests: started on a host of their own, ended with the test."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from connectors.plumbing.machine.process_tree import clean_environment
from connectors.programs.processes.session_host import SessionHost
from connectors.programs.processes.session_runner import HANDLE_VARIABLE
from schemas.settings.settings import Settings
from schemas.streams.session.sessions import SessionRow
from tests.broker_processes import wait_until

SECRET = "canary-5d1c0f-secret"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(3)))
print("here", flush=True)
time.sleep(600)
"""
# Only root can start what is another user's. For anybody else these are sessions like others, which end.
IS_ROOT = os.geteuid() == 0
BECOME_ANOTHER_USER = "os.setresuid(65534, 65534, 65534)" if IS_ROOT else "pass"
# Its own process stays ours; what it starts is the other user's.
MIXED = f"""
import os, time
child = os.fork()
if child == 0:
    {BECOME_ANOTHER_USER}
# Both write at once, so each in one piece.
os.write(1, f"{{'child' if child == 0 else 'parent'}} {{os.getpid()}}\\n".encode())
time.sleep(600)
"""


class RecordingHost(SessionHost):
    """Knows what it has started."""

    def __init__(self, settings: Settings, *, use_tmux: bool) -> None:
        super().__init__(settings, use_tmux=use_tmux)
        self.started: list[str] = []

    def start(self, session: str, spec: Path | None = None) -> str:
        self.started.append(super().start(session, spec))
        return self.started[-1]


@contextmanager
def session_host(folder: Path, kind: str) -> Iterator[SessionHost]:
    """A host of `kind` tmux or process; all its sessions are ended afterwards."""
    if kind == "tmux" and shutil.which("tmux") is None:
        pytest.fail("tmux is not installed: sudo apt-get install -y tmux")
    host = RecordingHost(Settings(data_dir=folder / "a data dir '%H' #{pid}"), use_tmux=kind == "tmux")
    try:
        yield host
    finally:
        for handle in host.started:
            host.stop(handle)
        Path("/tmp", f"tmux-{os.getuid()}", host._socket).unlink(missing_ok=True)  # noqa: S108  tmux leaves it


def start_session(host: SessionHost, *command: str, name: str = "s1", instructions: str | None = None) -> str:
    """Start a session as the command line does; its handle."""
    environment = {**clean_environment(), "CANARY": SECRET}
    spec = host.prepare(name, command, folder=Path.cwd(), environment=environment, instructions=instructions)
    handle = host.start(name, spec)
    host.keep(name, spec)
    host.release(name, handle)
    return handle


def start_python(host: SessionHost, code: str, name: str = "s1") -> str:
    """Start a session that runs this program; its handle."""
    return start_session(host, sys.executable, "-c", code, name=name)


def wait_shown(host: SessionHost, text: str, name: str = "s1") -> None:
    """Wait until the session's screen shows it."""
    log = host.folder(name) / "screen.log"
    wait_until(lambda: log.exists() and text in log.read_text(), what=f"{text!r} on the screen")


def marked(handle: str) -> list[int]:
    """The processes that bear the mark of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(HANDLE_VARIABLE) == handle and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def child_of(host: SessionHost, name: str) -> list[int]:
    """The other user's process in a session that runs MIXED, while it runs."""
    words = (host.folder(name) / "screen.log").read_text().split()
    pid = int(words[words.index("child") + 1])
    runs = psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return [pid] if runs else []


def session_row(place: SessionHost, status: str, handle: str, **fields: object) -> SessionRow:
    """A row of the registry of sessions."""
    known = {
        "session": "s1", "status": status, "description": "", "host": place.name, "handle": handle,
        "for_job": None, "job_id": None, "jobs_ended": 0, "created_by": "cli/operator",
        "created_at": 1, "stopped_at": None, "reason": None, "capture_id": None,
    }  # fmt: skip
    return SessionRow(**{**known, **fields})  # type: ignore[arg-type]
