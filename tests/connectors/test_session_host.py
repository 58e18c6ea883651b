"""Sessions on this machine: each in a tmux session or a process group, ended with all that it started."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from connectors.session_host import SessionHost, clean_environment
from connectors.session_keeper import SessionKeeper
from connectors.session_runner import HANDLE_VARIABLE, process_handle
from schemas.errors import NotFound
from schemas.life_cycles import ARCHIVED, RUNNING, STOPPED, TERMINATED
from schemas.settings import PROJECT_ROOT, Settings
from schemas.view_rows import SessionRow
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


@pytest.fixture(params=["tmux", "process"])
def host(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SessionHost]:
    if request.param == "tmux" and shutil.which("tmux") is None:
        pytest.fail("tmux is not installed: sudo apt-get install -y tmux")
    found = SessionHost(Settings(data_dir=tmp_path / "a data dir"), use_tmux=request.param == "tmux")
    started: list[str] = []
    start = found.start
    monkeypatch.setattr(found, "start", lambda name: started.append(start(name)) or started[-1])
    yield found
    for handle in started:
        found.stop(handle)
    Path("/tmp", f"tmux-{os.getuid()}", found._socket).unlink(missing_ok=True)  # noqa: S108  tmux leaves it


def _start(host: SessionHost, *command: str, name: str = "s1", instructions: str | None = None) -> str:
    environment = {**clean_environment(), "CANARY": SECRET}
    host.prepare(name, command, folder=Path.cwd(), environment=environment, instructions=instructions)
    handle = host.start(name)
    host.release(name, handle)
    return handle


def _shown(host: SessionHost, text: str, name: str = "s1") -> None:
    log = host.folder(name) / "screen.log"
    wait_until(lambda: log.exists() and text in log.read_text(), what=f"{text!r} on the screen")


def _marked(handle: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(HANDLE_VARIABLE) == handle and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.requirement("JE-14")
def test_a_session_runs_its_command_with_instructions_and_environment_and_notes_how_it_ended(
    host: SessionHost,
) -> None:
    code = "import os,sys; print(sys.stdin.read()[::-1], len(os.environ['CANARY'])); sys.exit(7)"
    handle = _start(host, sys.executable, "-c", code, instructions="drawkcab")
    _shown(host, f"backward {len(SECRET)}")
    end = wait_until(lambda: host.end_of("s1", handle), what="the end")
    assert end.exit_code == 7
    wait_until(lambda: not host.alive(handle), what="the session gone")


@pytest.mark.requirement("JE-14")
@pytest.mark.requirement("CM-05")
def test_secrets_of_a_session_stand_in_no_argument_and_in_files_for_their_owner_alone(
    host: SessionHost,
) -> None:
    handle = _start(host, sys.executable, "-c", POLITE)
    _shown(host, "here")
    for process in psutil.process_iter(["cmdline"]):
        assert SECRET not in " ".join(process.info["cmdline"] or ())
    spec = host.folder("s1") / "spec.json"
    assert stat.S_IMODE(spec.stat().st_mode) == 0o600
    assert stat.S_IMODE(spec.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((spec.parent / "screen.log").stat().st_mode) == 0o600
    host.stop(handle)


@pytest.mark.requirement("JE-14")
def test_the_command_begins_only_when_it_is_released(host: SessionHost) -> None:
    began = host.folder("s1") / "began"
    host.prepare("s1", ["touch", str(began)], folder=Path.cwd(), environment=clean_environment())
    code = "import sys, connectors.session_runner as r; r.RELEASE_S = 0.3; sys.exit(r.main(sys.argv[1:]))"
    spec = str(host.folder("s1") / "spec.json")
    done = subprocess.run(
        [sys.executable, "-c", code, spec, "tmux/none/none"], cwd=PROJECT_ROOT, timeout=30, capture_output=True
    )
    assert (done.returncode, began.exists()) == (127, False)
    handle = host.start("s1")
    host.release("s1", handle)
    wait_until(began.exists, what="the command")


@pytest.mark.requirement("JE-14")
def test_a_graceful_stop_lets_the_command_say_goodbye(host: SessionHost) -> None:
    handle = _start(host, sys.executable, "-c", POLITE)
    _shown(host, "here")
    assert host.stop(handle, grace_s=10)
    _shown(host, "bye")
    assert not host.alive(handle)
    assert host.stop(handle) is False


@pytest.mark.requirement("JE-14")
def test_what_is_deaf_to_sigterm_or_has_left_the_group_is_killed(host: SessionHost) -> None:
    # One that its parent has left behind, in a session of its own: only its mark tells whose it is.
    orphan = "import subprocess, sys\n"
    orphan += f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"
    away = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {orphan!r}])\n"
    handle = _start(host, sys.executable, "-c", away + STUBBORN)
    _shown(host, "deaf")
    wait_until(lambda: len(_marked(handle)) == 2, what="both at work")
    started = time.monotonic()
    assert host.stop(handle, grace_s=0.3)
    assert time.monotonic() - started < 8
    assert _marked(handle) == []
    assert not host.alive(handle)


@pytest.mark.requirement("JE-14")
def test_a_process_that_only_has_the_number_of_a_session_is_left_alone(tmp_path: Path) -> None:
    host = SessionHost(Settings(data_dir=tmp_path), use_tmux=False)
    handle = _start(host, sys.executable, "-c", POLITE)
    pid = handle.split("/")[1]
    other = subprocess.Popen([sys.executable, "-c", POLITE], stdout=subprocess.DEVNULL)
    not_ours = process_handle(other.pid)
    for stranger in (
        f"process/{pid}/1-00000000",
        not_ours,
        "tmux/default/main",
        "process/1",
        "process/x/y",
        "tmux/x",
    ):
        assert stranger is not None
        assert host.stop(stranger) is False
    assert host.alive(handle)
    assert other.poll() is None
    other.kill()
    other.wait(10)
    host.stop(handle)


@pytest.mark.requirement("JE-14")
def test_what_was_prepared_runs_again_under_a_new_handle(host: SessionHost) -> None:
    first = _start(host, sys.executable, "-c", POLITE)
    _shown(host, "here")
    host.stop(first)
    second = host.start("s1")
    host.release("s1", second)
    assert second != first
    wait_until(lambda: host.alive(second), what="the second run")
    assert host.stop(first) is False
    assert host.alive(second)
    host.stop(second)
    host.forget("s1")
    with pytest.raises(NotFound):
        host.start("s1")


@pytest.mark.requirement("JE-14")
def test_the_screen_is_captured_while_the_session_lives_and_after_it(host: SessionHost) -> None:
    handle = _start(host, sys.executable, "-c", POLITE)
    _shown(host, "here")
    alive = host.keep_capture("s1", handle, "c-1")
    assert "here" in alive.read_text()
    host.stop(handle)
    assert "here" in host.capture("s1", handle)


def _row(place: SessionHost, status: str, handle: str, **fields: object) -> SessionRow:
    known = {
        "session": "s1", "status": status, "description": "", "host": place.name, "handle": handle,
        "for_job": None, "job_id": None, "jobs_ended": 0, "created_by": "cli/operator",
        "created_at": 1, "stopped_at": None, "reason": None, "capture_id": None,
    }  # fmt: skip
    return SessionRow(**{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.requirement("JE-25")
def test_the_keeper_ends_here_what_the_registry_says_is_over_and_nothing_else(
    host: SessionHost, tmp_path: Path
) -> None:
    handles = {
        name: _start(host, sys.executable, "-c", POLITE, name=name) for name in ("a", "b", "c", "d", "e")
    }
    for name in handles:
        _shown(host, "here", name)
    rows = [
        _row(host, RUNNING, handles["a"], session="a"),
        _row(host, ARCHIVED, handles["b"], session="b"),
        _row(host, STOPPED, handles["c"], session="c"),
        _row(host, TERMINATED, handles["d"], session="d"),
        _row(host, TERMINATED, handles["e"], session="e", host="elsewhere"),
    ]
    keeper = SessionKeeper(Settings(data_dir=tmp_path / "a data dir"), lambda: rows, host, own_end_s=0)
    assert sorted(keeper.check()) == ["c", "d"]
    assert [name for name, handle in handles.items() if host.alive(handle)] == ["a", "b", "e"]
    assert (host.is_prepared("c"), host.is_prepared("d")) == (True, False)
    assert keeper.check() == []
    for handle in handles.values():
        host.stop(handle)
