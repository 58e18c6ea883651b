"""The launcher of agents as processes of this machine: what they have, how they fail, how they end."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.hub.launcher import hardening, local_processes
from connectors.hub.launcher.hardening import HANDLE_VARIABLE
from connectors.hub.launcher.launch_spec import LaunchFailed
from connectors.hub.launcher.local_processes import stop_all
from connectors.plumbing.machine.process_tree import process_handle
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import wait_until
from tests.connectors.hub.launcher.conftest import CANARY, HUB, IDLE, TOKEN, Place, pid_of, running
from tests.connectors.programs.processes.session_processes import POLITE, STUBBORN
from trunkline_agent.private_files import USER_UMASK_VARIABLE

pytestmark = [pytest.mark.requirement("HH-05"), pytest.mark.long]


@pytest.mark.parametrize("hardened", [False, True])
def test_an_agent_has_its_token_in_its_environment_and_nobody_has_it_elsewhere(
    place: Place,
    hardened: bool,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    commands = []
    spawn = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **more: commands.append(words) or spawn(words, **more)
    )
    started = place.start(IDLE, hardened=hardened)
    wait_until(lambda: "here" in place.output(), what="the agent at work")
    agent = psutil.Process(pid_of(started.handle))
    assert place.launcher.alive(started.handle)
    environment = agent.environ()
    assert {name: environment[name] for name in environment if name.startswith("TRUNKLINE")} == {
        TOKEN: CANARY,
        HUB: "http://127.0.0.1:9",
        "TRUNKLINE_TASK_ID": "t1",
        "TRUNKLINE_AGENT_NAME": "ann",
        "TRUNKLINE_TASK_DESCRIPTION": "some work",
        HANDLE_VARIABLE: started.handle,
    }
    assert CANARY not in str(agent.cmdline() + commands)
    assert len(commands) == 1
    for path in place.settings.data_path.rglob("*"):
        assert CANARY not in str(path)
        assert path.is_dir() or CANARY.encode() not in path.read_bytes()
    assert CANARY not in caplog.text + "".join(capfd.readouterr()) + repr(place.spec(["x"]))
    assert {path.name for path in Path(f"/proc/{agent.pid}/fd").iterdir()} == {"0", "1", "2"}
    assert os.getsid(agent.pid) == os.getpgid(agent.pid) == agent.pid
    log, noted = (place.settings.data_path / name for name in ("agents/c1/output.log", "run/agents/c1.json"))
    assert [stat.S_IMODE(p.stat().st_mode) for p in (log, log.parent, noted)] == [0o600, 0o700, 0o600]
    assert json.loads(noted.read_text()) == {"handle": started.handle, "container": "c1", "task_id": "t1"}


LOOK = """
import json, os, resource
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
names = ("CPU", "AS", "NOFILE", "NPROC", "CORE", "FSIZE")
print(json.dumps({
    "environment": dict(os.environ), "cwd": os.getcwd(), "files": os.listdir("."),
    "limits": {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names},
    "no_new_privileges": int(status["NoNewPrivs"]),
}), flush=True)
open("left.txt", "w").close()
"""


def test_a_hardened_agent_has_its_own_empty_folder_a_clean_environment_limits_and_no_new_privileges(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAMILIAR", "ours")
    numbers = {"cpu_seconds": 7, "memory_mb": 300, "open_files": 40, "processes": 5}
    rule = {"environment": {"OF_THE_RULE": "{project}", TOKEN: "not this"}, "working_dir": "/", **numbers}
    for _ in range(2):
        started = place.start(LOOK, hardened=True, rule=rule)
        wait_until(lambda handle=started.handle: not place.launcher.alive(handle), what="its end")
    said = place.said()
    work = str(place.settings.data_path / "agents" / "c1" / "work")
    own = {TOKEN: CANARY, "HOME": work, "TMPDIR": work, "OF_THE_RULE": str(PROJECT_ROOT)}
    assert own.items() <= said["environment"].items()
    named = {name for name in said["environment"] if not name.startswith("TRUNKLINE_")}
    assert named - {"LC_CTYPE"} == {"PATH", "LANG", "HOME", "TMPDIR", "OF_THE_RULE"}
    assert (said["cwd"], said["files"], said["no_new_privileges"]) == (work, [], 1)
    processes = said["limits"].pop("NPROC")
    assert processes[0] == processes[1] > 5
    held = {"CPU": 7, "AS": 300 * 2**20, "NOFILE": 40, "CORE": 0, "FSIZE": 256 * 2**20}
    assert said["limits"] == {name: [value, value] for name, value in held.items()}


def test_an_agent_that_is_not_hardened_has_our_environment_without_our_secrets(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAMILIAR", "ours")
    monkeypatch.setenv("TRUNKLINE__MASTER_KEY", "ours alone")
    place.start(LOOK, rule={"working_dir": str(tmp_path), "cpu_seconds": 7})
    said = place.said()
    assert (said["environment"]["FAMILIAR"], said["environment"][TOKEN]) == ("ours", CANARY)
    assert "TRUNKLINE__MASTER_KEY" not in said["environment"]
    assert (said["cwd"], said["limits"]["CPU"]) == (str(tmp_path), [-1, -1])


@pytest.mark.requirement("SE-02")
@pytest.mark.parametrize(("hardened", "wanted"), [(False, 0o027), (True, 0o077)])
def test_an_agent_has_the_users_umask_unless_it_works_below_the_data_directory(
    place: Place, hardened: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER_UMASK_VARIABLE, "027")
    place.start("import json, os; print(json.dumps({'umask': os.umask(0)}))", hardened=hardened)
    assert place.said() == {"umask": wanted}


def test_what_the_launcher_ignores_of_signals_the_agent_does_not(place: Place) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        place.launcher.start(place.spec(["sh", "-c", "grep SigIgn: /proc/self/status"]))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert int(wait_until(place.output, what="its words").split()[1], 16) == 0


@pytest.mark.usefixtures("patient")
def test_an_agent_that_cannot_be_hardened_is_not_started(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = Path(hardening.__file__).read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(code.replace("PR_SET_NO_NEW_PRIVS: Final = 38", "PR_SET_NO_NEW_PRIVS: Final = 9999"))
    monkeypatch.setattr(local_processes, "_RUNNER", broken)
    began = tmp_path / "began"
    with pytest.raises(LaunchFailed, match="exit code 126: cannot harden the agent"):
        place.launcher.start(place.spec(["touch", str(began)], hardened=True))
    assert not began.exists()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["no-such-program"], "exit code 127: cannot run no-such-program: No such file or directory"),
        (["/etc/passwd"], "exit code 127: cannot run /etc/passwd: Permission denied"),
        (["sh", "-c", "echo first; echo last >&2; echo; exit 3"], "exit code 3: last"),
        (["sh", "-c", f"echo $TRUNKLINE_AGENT_TOKEN at ${HUB}; exit 1"], "1: [secret] at http://127.0.0.1:9"),
        (["sh", "-c", "printf '\\033[31mred\\a'; exit 1"], r"exit code 1: \x1b[31mred\x07"),
        (["sh", "-c", "sleep 600 & env -i sleep 600 & kill -9 $$"], "signal 9"),
    ],
)
def test_a_start_that_fails_at_once_says_why_without_the_token_and_leaves_nothing(
    place: Place, command: list[str], why: str, hardened: bool
) -> None:
    with pytest.raises(LaunchFailed) as failure:
        place.launcher.start(place.spec(command, hardened=hardened))
    assert str(failure.value).endswith(why)
    assert place.noted() == []
    assert running(str(place.settings.data_path)) == []


@pytest.mark.usefixtures("patient")
def test_of_much_output_the_beginning_of_the_last_line_is_told_and_nothing_of_a_line_that_is_cut(
    place: Place,
) -> None:
    with pytest.raises(LaunchFailed) as failure:
        place.start("import sys; print('first\\n' + 'x' * 60_000); sys.exit(4)")
    assert str(failure.value).endswith("exit code 4: " + "x" * 300)
    for code in (f"import os; print(os.environ['{TOKEN}'] * 5_000)", "pass"):
        with pytest.raises(LaunchFailed, match=r"exit code 4$"):
            place.start(f"{code}; import sys; sys.exit(4)")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"image": "images/bo"}, "image images/bo in conf/launchers.yaml"),
        ({"container": "../c1"}, "not a valid name"),
        ({"description": "a\0b"}, "zero byte"),
        ({"environment": {TOKEN: CANARY, "BIG": "x" * 200_000}}, "Argument list too long"),
        ({"rule": {"working_dir": "no/such/folder"}}, "working_dir of images/ann in conf/launchers.yaml"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_runs(
    place: Place, fields: dict[str, Any], why: str
) -> None:
    spec = place.spec(["sleep", "600"], **fields)
    place.rules.pop("images/bo", None)
    with pytest.raises(LaunchFailed) as failure:
        place.launcher.start(spec)
    assert why in str(failure.value)
    assert CANARY not in str(failure.value)
    assert place.noted() == []


def test_an_agent_that_is_done_at_once_was_started_and_is_reaped_and_forgotten(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patience:
        patience.setattr(local_processes, "EARLY_END_S", 20.0)
        started = place.launcher.start(place.spec(["true"]))
    assert place.noted() == ["c1"]
    assert not place.launcher.alive(started.handle)
    assert place.noted() == []
    later = place.start("import time; time.sleep(0.5)").handle
    # Not even a zombie is left.
    wait_until(lambda: not place.launcher.alive(later) and not psutil.pid_exists(pid_of(later)), what="its end")


STARTER = """
import os, signal, sys
from pathlib import Path
from connectors.hub.launcher.launch_spec import LaunchRule
from connectors.hub.launcher.local_processes import LocalProcessLauncher
from connectors.hub.launcher.launch_spec import LaunchSpec
from schemas.settings.settings import Settings
rules = {"i": LaunchRule(command=["sleep", "600"])}
spec = LaunchSpec(container="c2", task_id="t", agent_name="a", image="i", description="", environment={})
print(LocalProcessLauncher(Settings(data_dir=Path(sys.argv[1])), rules).start(spec).handle, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_agents_outlive_who_started_them_and_all_of_a_data_directory_are_ended_together(
    place: Place, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STARTER, str(place.settings.data_path)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    orphan = done.stdout.strip()
    mine = place.start(IDLE).handle
    other = Place(tmp_path / "other")
    stranger = other.start(IDLE).handle
    try:
        assert place.launcher.alive(orphan)
        assert Path(f"/proc/{pid_of(orphan)}/fd/0").readlink() == Path(os.devnull)
        assert place.noted() == ["c1", "c2"]
        assert stop_all(place.settings) == 2
        assert [place.launcher.alive(handle) for handle in (orphan, mine)] == [False, False]
        assert other.launcher.alive(stranger)
        assert place.noted() == []
        assert stop_all(place.settings) == 0
    finally:
        assert stop_all(other.settings, 0.0) == 1


def test_an_agent_whose_launcher_ends_before_it_is_noted_runs_nothing(tmp_path: Path) -> None:
    began = tmp_path / "began"
    ours, theirs = socket.socketpair()
    order = {"socket": theirs.fileno(), "limits": None, "command": ["touch", str(began)]}
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", hardening.__file__],
            env={**os.environ, hardening.ORDER_VARIABLE: json.dumps(order)},
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
    ours.close()
    assert b"ended before" in child.communicate(timeout=20)[1]
    assert (child.returncode, began.exists()) == (hardening.EXIT_NOT_LET_GO, False)


def test_a_container_runs_once_however_often_it_is_started(place: Place) -> None:
    spec = place.spec(["sleep", "600"])
    with ThreadPoolExecutor(4) as pool:
        handles = {started.handle for started in pool.map(place.launcher.start, [spec] * 4)}
    assert len(handles) == 1
    with pytest.raises(LaunchFailed, match="another task"):
        place.start(IDLE, task_id="t2")
    (first,) = handles
    place.launcher.stop(first, 5.0)
    again = place.start(IDLE, task_id="t2").handle
    place.launcher.stop(first, 5.0)
    assert place.launcher.alive(again)


def test_an_agent_is_asked_to_end_and_has_its_time_for_it(place: Place) -> None:
    started = place.start(POLITE)
    wait_until(lambda: "here" in place.output(), what="the agent at work")
    place.launcher.stop(started.handle, 20.0)
    assert place.output() == "here\nbye\n"
    assert not place.launcher.alive(started.handle)
    assert place.noted() == []
    place.launcher.stop(started.handle, 20.0)


@pytest.mark.parametrize("leader", [STUBBORN, "pass"], ids=["deaf", "gone"])
def test_what_is_deaf_or_has_gone_away_is_killed_after_the_grace(place: Place, leader: str) -> None:
    # By their arguments the test finds them: one has no mark, one has left its session.
    deaf = f"{STUBBORN}# {place.settings.data_path}"
    family = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {deaf!r}])
subprocess.Popen([sys.executable, "-c", {deaf!r}], start_new_session=True)
subprocess.Popen([sys.executable, "-c", {deaf!r}], env={{"PATH": os.environ["PATH"]}})
"""
    started = place.start(family + leader)
    stays = leader == STUBBORN
    wait_until(lambda: place.output().count("deaf") == 3 + stays, what="all of them at work")
    wait_until(lambda: place.launcher.alive(started.handle) is stays, what="the first there or gone")
    assert place.noted() == ["c1"]
    before = time.monotonic()
    place.launcher.stop(started.handle, 0.3)
    assert time.monotonic() - before >= 0.3
    assert running(str(place.settings.data_path)) == []
    assert place.noted() == []


def test_an_agent_that_has_cleared_its_environment_is_known_by_its_file(place: Place) -> None:
    handle = place.launcher.start(place.spec(["env", "-i", "sleep", "600"])).handle
    assert place.launcher.alive(handle)
    place.launcher.stop(handle, 5.0)
    assert not psutil.pid_exists(pid_of(handle))


def test_a_process_that_is_not_this_run_is_never_signalled(place: Place, tmp_path: Path) -> None:
    handle = place.start(POLITE).handle
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    theirs = process_handle(other.pid)
    reused = f"process/{pid_of(handle)}/1-00000000"
    assert theirs is not None
    for stranger in (reused, theirs, "process/1/1-0", "process/x/1-0", "tmux/a/b", "", f"{handle}0"):
        assert not place.launcher.alive(stranger)
        place.launcher.stop(stranger, 0.1)
    # A number that a file of ours still names, and that has come to another process.
    noted = place.settings.data_path / "run" / "agents" / "c9.json"
    wrong = f"process/{other.pid}/1-0"
    told = json.dumps({"handle": wrong, "container": "c9", "task_id": "t"})
    noted.write_text(told)
    assert (place.launcher.alive(wrong), place.noted()) == (False, ["c1"])
    noted.write_text(told)
    assert stop_all(place.settings, 5.0) == 1
    assert other.poll() is None
    other.kill()
    other.wait(10)
