"""Memory: what the kernel allows and counts, and that a part which it killed for memory is named so."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.cli.doctor.findings import check_part
from connectors.cli.doctor.machine import check_memory
from connectors.plumbing.machine import state_file
from connectors.programs.local_stack import memory
from connectors.programs.local_stack.memory import (
    MIB,
    NEEDS_MIB,
    OomKills,
    memory_limit,
    needed_mib,
    oom_kills,
    shortage,
)
from connectors.programs.local_stack.mosquitto_plan import mosquitto_plan
from connectors.programs.local_stack.part import Part
from connectors.programs.local_stack.part_plan import ALL_PARTS
from schemas.settings.settings import Settings
from tests.broker_processes import wait_until

pytestmark = pytest.mark.requirement("OP-53")


def cgroup(folder: Path, line: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A process's folder below /proc and the root of cgroups, with these files."""
    proc, root = folder / "proc", folder / "cgroup"
    proc.mkdir()
    (proc / "cgroup").write_text(line + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return proc, root


V2 = {
    "memory.max": "max\n",
    "pod/memory.max": "2147483648\n",
    "pod/one/memory.max": "max\n",
    "pod/one/memory.events": "low 0\noom 3\noom_kill 2\n",
}
V1 = {
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/docker/a/memory.limit_in_bytes": "1572864000\n",
    "memory/docker/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
}


@pytest.mark.parametrize(
    ("line", "files", "limit", "kills"),
    [
        ("0::/pod/one", V2, 2 * 2**30, 2),
        ("0::/", {"memory.max": "1073741824\n", "memory.events": "oom_kill 1\n"}, 2**30, 1),
        ("5:cpu:/\n4:memory:/docker/a\n0::/", V1, 1500 * MIB, 5),
        # A container with its own view: the host's path does not exist below the root.
        ("4:memory:/docker/elsewhere", V1, None, None),
        ("0::/", {"memory.max": "max\n"}, None, None),
        ("0::/nowhere", {}, None, None),
    ],
)
def test_the_limit_and_the_kills_of_a_cgroup_are_those_of_the_kernel(
    line: str, files: dict[str, str], limit: int | None, kills: int | None, tmp_path: Path
) -> None:
    places = cgroup(tmp_path, line, files)
    assert (memory_limit(*places), oom_kills(*places)) == (limit, kills)


def test_a_limit_below_the_need_of_the_parts_is_named_with_both_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: 1500 * MIB)
    assert set(NEEDS_MIB) == set(ALL_PARTS)
    assert f"need about {needed_mib(ALL_PARTS)} MiB, and the cgroup allows 1500 MiB" in (shortage() or "")
    found = check_memory(Settings())
    assert (found.level, "1500 MiB" in found.found, "up --only" in found.mend) == ("warn", True, True)
    assert shortage(("kafka", "mosquitto")) is None
    monkeypatch.setattr(memory, "memory_limit", lambda: None)
    assert shortage(("mosquitto",)) is None
    assert "this machine has" in (shortage(in_use=-(2**50)) or "")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([7, 8], "exit code -9 before it was ready, because the kernel killed it for memory"),
        ([7, 7], "another program killed it, or the kernel"),
        ([None, None], "another program killed it, or the kernel"),
    ],
)
def test_a_part_that_the_kernel_killed_for_memory_is_named_so_in_state_and_doctor(
    counts: list[int | None], expected: str, stack_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(counts)
    kills = OomKills(lambda: next(left, counts[-1]))
    kills.look()
    monkeypatch.setattr(memory, "KILLS", kills)
    program = "import os, time; os.kill(os.getpid(), 9)"
    plan = replace(mosquitto_plan(stack_settings), command=lambda: [sys.executable, "-c", program])
    part = Part(plan, stack_settings)
    part.schedule()
    part.look_after()
    wait_until(lambda: part.look_after() or part.failures, what="the end of the part")
    assert part.failure is not None and expected in part.failure
    assert part.as_json()["memory_kills"] == (1 if counts == [7, 8] else 0)
    state = {"phase": "running", "supervisor": state_file.identity(), "parts": {"mosquitto": part.as_json()}}
    state["parts"]["mosquitto"]["waits_for"] = None
    state["names"], state["detached"] = ["mosquitto"], True
    state_file.state_path(stack_settings).parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(state_file, "read_state", lambda _settings: state)
    found = check_part(stack_settings, "mosquitto")
    assert found.level == "fail" and expected in found.found
    assert (memory.PAGE in found.mend) is (counts == [7, 8])


def test_a_part_that_the_supervisor_itself_ended_is_not_named_killed_for_memory(
    stack_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = OomKills(iter(range(1000)).__next__)  # it rises at each look
    kills.look()
    monkeypatch.setattr(memory, "KILLS", kills)
    program = "import time; time.sleep(60)"
    plan = replace(mosquitto_plan(stack_settings), command=lambda: [sys.executable, "-c", program])
    part = Part(plan, stack_settings)
    part.schedule()
    part.look_after()
    part.kill()
    part.look_after()
    assert part.failure == f"ended with exit code -{int(signal.SIGKILL)} before it was ready"
    assert part.memory_kills == 0


def test_a_rise_of_the_counter_is_recent_for_some_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now, count = [100.0], [3]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kills = OomKills(lambda: count[0])
    assert not kills.are_recent(), "kills of before count for nobody"
    count[0], now[0] = 4, 101.0
    assert kills.are_recent()
    now[0] = 107.0
    assert not kills.are_recent()
