"""The keeper ends the processes of sessions that are over, and one that fails delays no other."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from connectors.programs.processes.session_host import SessionHost
from connectors.programs.processes.session_keeper import SessionKeeper
from schemas.fold.settled import AppliedChange
from schemas.fold.stream_kind import RUNNING, STOPPED
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.session.sessions import ARCHIVED, TERMINATED, SessionRow
from tests.broker_processes import wait_until
from tests.connectors.programs.processes.session_processes import (
    BECOME_ANOTHER_USER,
    IS_ROOT,
    MIXED,
    POLITE,
    STUBBORN,
    child_of,
    marked,
    session_host,
    session_row,
    start_python,
    wait_shown,
)

pytestmark = pytest.mark.tmux


@pytest.mark.requirement("JE-25")
def test_the_keeper_ends_here_what_the_registry_says_is_over_and_nothing_else(
    host: SessionHost, tmp_path: Path
) -> None:
    handles = {name: start_python(host, POLITE, name) for name in ("a", "b", "c", "d", "e")}
    for name in handles:
        wait_shown(host, "here", name)
    rows = [
        session_row(host, RUNNING, handles["a"], session="a"),
        session_row(host, ARCHIVED, handles["b"], session="b"),
        session_row(host, STOPPED, handles["c"], session="c"),
        session_row(host, TERMINATED, handles["d"], session="d"),
        session_row(host, TERMINATED, handles["e"], session="e", host="elsewhere"),
    ]
    keeper = SessionKeeper(Settings(data_dir=tmp_path / "a data dir"), lambda _: rows, host, own_end_s=0)
    keeper.load()
    assert _checked(keeper, 2) == ["c", "d"]
    assert [name for name, handle in handles.items() if host.alive(handle)] == ["a", "b", "e"]
    assert (host.is_prepared("c"), host.is_prepared("d")) == (True, False)
    assert keeper.check() == []
    # The stopped session is now terminated: it has no process to end, and its files are no longer kept.
    keeper.on_change(changed(session_row(host, TERMINATED, handles["c"], session="c")))
    assert keeper.check() == []
    assert not host.is_prepared("c")
    for handle in handles.values():
        host.stop(handle)


@pytest.mark.requirement("ST-71")
def test_at_its_start_the_keeper_asks_for_the_sessions_that_have_files_or_processes_here(
    host: SessionHost, tmp_path: Path
) -> None:
    handle = start_python(host, POLITE, "runs")
    wait_shown(host, "here", "runs")
    host.forget("runs")
    for name in ("kept", "forgotten"):
        host.keep(name, host.prepare(name, ["true"], folder=tmp_path, environment={}))
    host.forget("forgotten")
    asked: list[set[str]] = []

    def rows_of(names: Collection[str]) -> list[SessionRow]:
        asked.append(set(names))
        return [session_row(host, TERMINATED, handle, session=name) for name in names if name == "runs"]

    keeper = SessionKeeper(Settings(data_dir=tmp_path / "a data dir"), rows_of, host, own_end_s=0)
    keeper.load()
    assert asked == [{"runs", "kept"}]
    assert _checked(keeper, 1) == ["runs"]


def changed(row: SessionRow) -> AppliedChange:
    """The change with which the live view reports a row."""
    return AppliedChange(row.VIEW, row.key, 1, row)


@pytest.mark.requirement("ST-71")
def test_the_keeper_reads_sessions_once_and_then_looks_at_those_that_changed(tmp_path: Path) -> None:
    looks: list[set[str]] = []

    class Host(SessionHost):
        def left_of(self, handles: Iterable[str]) -> set[str]:
            looks.append(set(handles))
            return looks[-1] - gone

    host, reads, gone = (
        Host(Settings(data_dir=tmp_path), use_tmux=False),
        [],
        {f"process/{n}/1-0" for n in range(500)},
    )
    rows = [session_row(host, TERMINATED, handle, session=handle[8:]) for handle in sorted(gone)]

    def rows_of(names: Collection[str]) -> list[SessionRow]:
        reads.append(1)
        return rows

    keeper = SessionKeeper(Settings(data_dir=tmp_path), rows_of, host)
    keeper.load()
    for _ in range(3):
        assert keeper.check() == []
    assert (len(reads), looks) == (1, [gone])
    # One that stops is looked at in each check until nothing of it runs, or until it runs again.
    keeper.on_change(changed(session_row(host, STOPPED, "process/900/1-0", session="s")))
    keeper.on_change(changed(session_row(host, STOPPED, "process/901/1-0", session="t")))
    keeper.check()
    keeper.on_change(changed(session_row(host, RUNNING, "process/901/1-0", session="t")))
    keeper.check()
    gone.add("process/900/1-0")
    keeper.check()
    keeper.check()
    both, one = {"process/900/1-0", "process/901/1-0"}, {"process/900/1-0"}
    assert (len(reads), looks[1:]) == (1, [both, one, one])


def _checked(keeper: SessionKeeper, count: int) -> list[str]:
    """Wait until `count` sessions were ended, and return them in order."""
    ended: list[str] = []

    def enough() -> bool:
        ended.extend(keeper.check())
        return len(ended) >= count

    wait_until(enough, what=f"{count} ended")
    return sorted(ended)


@pytest.mark.requirement("JE-25")
def test_a_session_that_is_deaf_is_killed_and_holds_up_no_other(host: SessionHost, tmp_path: Path) -> None:
    deaf = ["a", "b", "c", "e", "f"]
    handles = {name: start_python(host, STUBBORN, name) for name in deaf}
    handles["d"] = start_python(host, POLITE, "d")
    for name in handles:
        wait_shown(host, "here" if name == "d" else "deaf", name)
    rows = [session_row(host, TERMINATED, handle, session=name) for name, handle in handles.items()]
    keeper = SessionKeeper(Settings(data_dir=tmp_path), lambda _: rows, host, own_end_s=0, grace_s=3)
    keeper.load()
    started = time.monotonic()
    assert _checked(keeper, 1) == ["d"]
    assert all(marked(handles[name]) for name in deaf)
    assert _checked(keeper, len(deaf)) == deaf
    # One after another they would take 15 s.
    assert time.monotonic() - started < 13
    assert not any(marked(handle) for handle in handles.values())


@pytest.mark.requirement("JE-25")
def test_thousands_of_old_sessions_are_looked_at_together(host: SessionHost, tmp_path: Path) -> None:
    live = start_python(host, POLITE, "z")
    wait_shown(host, "here", "z")
    old = [f"tmux/{host._socket}/x-{n}" if n % 2 else f"process/{n}/1-0" for n in range(3000)]
    rows = [session_row(host, TERMINATED, handle, session=f"x{n}") for n, handle in enumerate(old)]
    rows.append(session_row(host, TERMINATED, live, session="z"))
    keeper = SessionKeeper(Settings(data_dir=tmp_path), lambda _: rows, host, own_end_s=0)
    keeper.load()
    started = time.monotonic()
    assert _checked(keeper, 1) == ["z"]
    assert time.monotonic() - started < 30


AS_ANOTHER_USER = f"""
import os, sys
from connectors.programs.processes.session_host import SessionHost
from connectors.programs.processes.session_keeper import SessionKeeper
from schemas.settings.settings import Settings
from tests.connectors.programs.processes.session_processes import session_row
settings = Settings(data_dir=sys.argv[1])
host = SessionHost(settings, use_tmux=False)
rows = [session_row(host, "stopped", handle, session=handle) for handle in sys.argv[2:]]
keeper = SessionKeeper(settings, lambda _: rows, host, own_end_s=0, grace_s=0)
keeper.load()
assert len(host.left_of(sys.argv[2:])) == 2
{BECOME_ANOTHER_USER}
for _ in range(3):
    keeper.check()
"""


@pytest.mark.requirement("JE-25")
def test_a_process_of_another_user_keeps_the_keeper_from_no_other(tmp_path: Path) -> None:
    with session_host(tmp_path, "process") as host:
        handles = [start_python(host, MIXED, name) for name in ("s1", "s2")]
        for name in ("s1", "s2"):
            wait_shown(host, "child", name)
        command = [sys.executable, "-c", AS_ANOTHER_USER, str(tmp_path), *handles]
        done = subprocess.run(command, cwd=PROJECT_ROOT, timeout=60, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: child_of(host, "s1") + child_of(host, "s2") == [], what="the other's ended")
        left = set(handles) if IS_ROOT else set()
        wait_until(lambda: host.left_of(handles) == left, what="only what is not ours to end is left")
