"""Sessions on this machine: each in a tmux session or a process group, ended with all that it started."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from connectors.plumbing.machine.process_tree import clean_environment, process_handle
from connectors.programs.processes.session_host import SessionHost
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import wait_until
from tests.connectors.programs.processes.session_processes import (
    BECOME_ANOTHER_USER,
    IS_ROOT,
    MIXED,
    POLITE,
    SECRET,
    STUBBORN,
    child_of,
    marked,
    session_host,
    start_python,
    start_session,
    wait_shown,
)
from tests.file_modes import open_to_others
from trunkline_agent.errors import NotFound
from trunkline_agent.private_files import USER_UMASK_VARIABLE

pytestmark = pytest.mark.tmux


@pytest.mark.requirement("JE-14")
def test_a_session_runs_its_command_with_instructions_and_environment_and_notes_how_it_ended(
    host: SessionHost,
) -> None:
    code = "import os,sys; print(sys.stdin.read()[::-1], len(os.environ['CANARY'])); sys.exit(7)"
    handle = start_session(host, sys.executable, "-c", code, instructions="drawkcab")
    wait_shown(host, f"backward {len(SECRET)}")
    end = wait_until(lambda: host.end_of("s1", handle), what="the end")
    assert end.exit_code == 7
    wait_until(lambda: not host.alive(handle), what="the session gone")


@pytest.mark.requirement("JE-14")
@pytest.mark.requirement("CM-05")
def test_secrets_of_a_session_stand_in_no_argument_and_in_files_for_their_owner_alone(
    host: SessionHost,
) -> None:
    handle = start_python(host, POLITE)
    wait_shown(host, "here")
    for process in psutil.process_iter(["cmdline"]):
        assert SECRET not in " ".join(process.info["cmdline"] or ())
    (spec,) = host.folder("s1").glob("spec-*.json")
    assert stat.S_IMODE(spec.stat().st_mode) == 0o600
    assert stat.S_IMODE(spec.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((spec.parent / "screen.log").stat().st_mode) == 0o600
    host.stop(handle)


@pytest.mark.requirement("SE-02")
def test_the_command_of_a_session_has_its_users_umask_and_our_files_stay_private(
    host: SessionHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER_UMASK_VARIABLE, "027")
    handle = start_session(host, sys.executable, "-c", "import os; print(oct(os.umask(0)), flush=True)")
    wait_shown(host, "0o27")
    wait_until(lambda: host.end_of("s1", handle), what="the end")
    assert open_to_others(host.folder("s1")) == []


@pytest.mark.requirement("JE-14")
def test_the_command_begins_only_when_it_is_released(host: SessionHost) -> None:
    began = host.folder("s1") / "began"
    spec = host.prepare("s1", ["touch", str(began)], folder=Path.cwd(), environment=clean_environment())
    module = "connectors.programs.processes.session_runner"
    code = f"import sys, {module} as r; r.RELEASE_S = 0.3; sys.exit(r.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(spec), "tmux/none/none"]
    done = subprocess.run(command, cwd=PROJECT_ROOT, timeout=30, capture_output=True)
    assert (done.returncode, began.exists()) == (127, False)
    handle = host.start("s1", spec)
    host.release("s1", handle)
    wait_until(began.exists, what="the command")


@pytest.mark.requirement("JE-14")
def test_a_graceful_stop_lets_the_command_say_goodbye(host: SessionHost) -> None:
    handle = start_python(host, POLITE)
    wait_shown(host, "here")
    assert host.stop(handle, grace_s=10)
    wait_shown(host, "bye")
    assert not host.alive(handle)
    assert host.stop(handle) is False


@pytest.mark.requirement("JE-14")
def test_what_is_deaf_to_sigterm_or_has_left_the_group_is_killed(host: SessionHost) -> None:
    # One that its parent has left behind, in a session of its own: only its mark tells whose it is.
    orphan = "import subprocess, sys\n"
    orphan += f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"
    away = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {orphan!r}])\n"
    handle = start_python(host, away + STUBBORN)
    wait_shown(host, "deaf")
    wait_until(lambda: len(marked(handle)) == 2, what="both at work")
    started = time.monotonic()
    assert host.stop(handle, grace_s=0.3)
    assert time.monotonic() - started < 30
    assert marked(handle) == []
    assert not host.alive(handle)


@pytest.mark.requirement("JE-14")
def test_a_process_that_only_has_the_number_of_a_session_is_left_alone(tmp_path: Path) -> None:
    host = SessionHost(Settings(data_dir=tmp_path), use_tmux=False)
    handle = start_python(host, POLITE)
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
    first = start_python(host, POLITE)
    wait_shown(host, "here")
    host.stop(first)
    second = host.start("s1")
    host.release("s1", second)
    assert second != first
    wait_until(lambda: host.alive(second), what="the second run")
    assert host.stop(first) is False
    assert host.alive(second)
    host.stop(second)
    host.forget("s1")
    assert list(host.folder("s1").glob("*spec*")) == []
    with pytest.raises(NotFound):
        host.start("s1")


@pytest.mark.requirement("JE-14")
def test_two_who_take_one_name_at_once_each_run_their_own_and_what_the_registry_took_is_kept(
    host: SessionHost,
) -> None:
    specs = [
        host.prepare("s1", ["echo", who], folder=Path.cwd(), environment=clean_environment())
        for who in ("the winner", "the loser")
    ]
    winner, loser = (host.start("s1", spec) for spec in specs)
    host.keep("s1", specs[0])
    host.stop(loser)
    specs[1].unlink()
    host.release("s1", winner)
    wait_shown(host, "the winner")
    wait_until(lambda: host.end_of("s1", winner), what="its end")
    again = host.start("s1")
    host.release("s1", again)
    wait_until(lambda: (host.folder("s1") / "screen.log").read_text().count("the winner") == 2, what="again")
    assert "the loser" not in (host.folder("s1") / "screen.log").read_text()


@pytest.mark.requirement("JE-14")
def test_the_screen_is_captured_while_the_session_lives_and_after_it(host: SessionHost) -> None:
    handle = start_python(host, POLITE)
    wait_shown(host, "here")
    alive = host.keep_capture("s1", handle, "c-1")
    assert "here" in alive.read_text()
    host.stop(handle)
    assert "here" in host.capture("s1", handle)


@pytest.mark.requirement("JE-14")
def test_of_a_log_that_has_grown_large_only_the_end_is_read_and_the_next_run_begins_anew(
    tmp_path: Path,
) -> None:
    host = SessionHost(Settings(data_dir=tmp_path), use_tmux=False)
    host.stop(start_session(host, "true"))
    log = host.folder("s1") / "screen.log"
    with log.open("ab") as file:
        # A sparse file: no memory would hold it.
        file.truncate(1 << 42)
        file.seek(0, os.SEEK_END)
        file.write(b"\xa4 the end\n")
    captured = host.capture("s1", None)
    assert captured.endswith("the end\n")
    assert len(captured) <= 256 * 1024
    host.stop(host.start("s1"))
    assert log.stat().st_size < 1024
    assert log.with_name("screen.log.1").stat().st_size > 1 << 42


STOP_AS_ANOTHER_USER = f"""
import os, sys
from connectors.programs.processes.session_host import SessionHost
from trunkline_agent.errors import TrunklineError
from schemas.settings.settings import Settings
host = SessionHost(Settings(data_dir=sys.argv[1]), use_tmux=False)
assert host.alive(sys.argv[2])
{BECOME_ANOTHER_USER}
try:
    host.stop(sys.argv[2], grace_s=0.1)
except TrunklineError as error:
    print(error)
"""


@pytest.mark.requirement("JE-14")
def test_what_another_user_owns_is_told_and_the_rest_is_ended(tmp_path: Path) -> None:
    with session_host(tmp_path, "process") as host:
        handle = start_python(host, MIXED)
        wait_shown(host, "child")
        command = [sys.executable, "-c", STOP_AS_ANOTHER_USER, str(tmp_path), handle]
        done = subprocess.run(command, cwd=PROJECT_ROOT, timeout=60, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert child_of(host, "s1") == []
        assert (host.alive(handle), "do not end" in done.stdout) == (IS_ROOT, IS_ROOT)
