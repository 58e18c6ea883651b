"""Faults of the local stores in `./trunkline prove`: each ends when it has been dealt with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from jobs.settling import partition_task
from jobs.settling.partition_task import StageSettings
from schemas.settings.settings import PROJECT_ROOT
from schemas.state_store.gateway_store import GatewayStore
from schemas.state_store.local_store import StoreDamaged
from schemas.state_store.partition_store import PartitionStore, Position
from tests.connectors.hub.live.local_stores import place_at
from tests.faults.prove import store_faults
from tests.faults.prove.crash_points import FOLDER_VARIABLE, arm
from tests.faults.prove.crashing_tasks import ELSEWHERE, TASKS, settle_partitions
from tests.faults.prove.schedule import DELETE, REPLACE, TRUNCATE
from tests.faults.prove.seed_parts import on_small_disk
from tests.programs import run_program

pytestmark = pytest.mark.requirement("ST-60")

NAME = "partition-00000"


def settled_to(folder: Path, offset: int) -> None:
    """Bring the store of a partition to an offset, as a task does."""
    with closing(PartitionStore(folder / NAME)) as store:
        changes = [(f"job/{number:08x}", "job", bytes(400)) for number in range(100)]
        store.load(store.position(), Position("t", 1, 9, offset, "c"), changes)


def offset_of(folder: Path) -> int | None:
    """The offset of that store, if there is one."""
    return store_faults.known_stores(folder).get(folder / NAME)


def is_over(stages: store_faults.Stages) -> bool:
    """Resume a fault once, and return whether it has ended."""
    return next(stages, stages) is stages


def test_a_deleted_store_counts_when_a_task_has_made_it_again(tmp_path: Path) -> None:
    stages = store_faults.deleted(tmp_path)
    assert not is_over(stages), "there is nothing to delete"
    settled_to(tmp_path, 0)
    assert not is_over(stages), "a store at the beginning has nothing to lose"
    settled_to(tmp_path, 7)
    assert next(stages) is True, "only its end is to come"
    assert not (tmp_path / NAME).exists()
    settled_to(tmp_path, 7)
    assert is_over(stages)


def test_a_truncated_store_counts_when_a_task_has_made_it_again(tmp_path: Path) -> None:
    settled_to(tmp_path, 7)
    stages = store_faults.truncated(tmp_path)
    assert not is_over(stages)
    with pytest.raises(StoreDamaged, match="truncated"):
        PartitionStore(tmp_path / NAME)
    assert not is_over(stages)
    (tmp_path / NAME / "data.mdb").unlink()
    settled_to(tmp_path, 7)
    assert is_over(stages)


def test_an_old_copy_replaces_a_store_and_counts_when_a_task_has_brought_it_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_faults, "_OLD_S", 0.0)
    folder = tmp_path / "settling"
    settled_to(folder, 7)
    stages = store_faults.replaced(folder)
    assert not is_over(stages)
    settled_to(folder, 9)
    assert not is_over(stages)
    assert offset_of(folder) == 7
    settled_to(folder, 8)
    assert not is_over(stages), "it is still behind"
    settled_to(folder, 9)
    assert is_over(stages)


def gateway_settled_to(folder: Path, offset: int) -> None:
    """Bring the store of a gateway to an offset."""
    with closing(GatewayStore(folder)) as store:
        after, entries = place_at({0: offset}), [(f"job/{n:08x}", "job", bytes(400)) for n in range(100)]
        if (before := store.position()) is None:
            store.load(entries, [])
            store.finish_load(after)
        else:
            store.advance(before, after, entries, [])


@pytest.mark.parametrize("how", [DELETE, TRUNCATE, REPLACE])
def test_the_store_of_a_killed_gateway_is_spoiled_and_counts_when_it_is_as_far_as_before(
    tmp_path: Path, how: str
) -> None:
    folder, kills = tmp_path / "gateway-1" / "store", list[str]()
    stages = store_faults.of_gateway(how, folder, lambda: kills.append("kill"))
    assert not is_over(stages) and not folder.exists(), "there is nothing to spoil"
    gateway_settled_to(folder, 7)
    if how == REPLACE:
        assert next(stages) is False and not kills
        gateway_settled_to(folder, 9)
    assert next(stages) is True and kills == ["kill"], "only its end is to come"
    assert store_faults.records_in(folder) == (7 if how == REPLACE else 0)
    if how == TRUNCATE:
        with pytest.raises(StoreDamaged, match="truncated"):
            GatewayStore(folder)
        shutil.rmtree(folder)
    gateway_settled_to(folder, 5)
    assert next(stages) is True, "it is still behind"
    gateway_settled_to(folder, 9)
    assert is_over(stages) and kills == ["kill"]


def test_tasks_use_other_stores_while_they_are_elsewhere_and_then_catch_up(tmp_path: Path) -> None:
    folder, points = tmp_path / "settling", tmp_path / "points"
    settled_to(folder, 7)
    stages = store_faults.elsewhere(folder, points, for_s=0.0)
    assert not is_over(stages)
    assert (points / f"{TASKS}.{ELSEWHERE}").exists()
    settled_to(tmp_path / f"settling-{ELSEWHERE}", 9)
    assert not is_over(stages)
    assert not (points / f"{TASKS}.{ELSEWHERE}").exists()
    settled_to(folder, 9)
    assert is_over(stages)


def test_what_lasts_ends_with_the_seed_and_does_not_count(tmp_path: Path) -> None:
    folder, points = tmp_path / "settling", tmp_path / "points"
    settled_to(folder, 7)
    for stages in (
        store_faults.elsewhere(folder, points, 60.0),
        store_faults.on_full_disk(points, tmp_path / "log", 60.0),
    ):
        assert not is_over(stages)
        assert len(list(points.iterdir())) == 1
        stages.close()
        assert list(points.iterdir()) == []


def test_a_task_uses_the_other_stores_only_while_it_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Path] = []

    def settled(at: StageSettings, *_: object) -> list[pa.RecordBatch]:
        used.append(at.stores)
        return []

    monkeypatch.setattr(partition_task, "settle_partitions", settled)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    at = StageSettings("l", "e", Path("stores"), 1, Path("key"))
    for is_elsewhere in (False, True):
        if is_elsewhere:
            arm(tmp_path, f"{TASKS}.{ELSEWHERE}")
        assert list(settle_partitions(at, SimpleNamespace(), [])) == []  # type: ignore[arg-type]
    assert used == [Path("stores"), Path(f"stores-{ELSEWHERE}")]


ON_FULL_DISK = """
import atexit, os, pathlib, subprocess, sys, threading, lmdb
from schemas.state_store.partition_store import PartitionStore, Position
from tests.faults.prove.crashing_streams import FullDisk
folder, points = map(pathlib.Path, sys.argv[1:3])
if sys.argv[3:]:
    FullDisk(folder).run()
assert folder.is_mount()
# The driver has no store open, and tasks are other processes.
driver = subprocess.Popen([sys.executable, "-P", "-c", sys.orig_argv[3], *sys.argv[1:], "driver"])
atexit.register(driver.kill)
store, at = PartitionStore(folder / "partition-00000"), None
for turn in range(1, 600):
    if turn == 3:
        (points / "tasks.disk_full").write_text("1")
    threading.Event().wait(0.05)
    after = Position("t", 1, 9, turn, "c")
    try:
        changes = [(f"job/{turn}", f"e{n}", bytes(4000)) for n in range(5)]
        store.load(None, after, changes) if at is None else store.advance(at, after, changes)
    except lmdb.Error as error:
        assert (folder / "filler").stat().st_size > 1 << 20
        print(type(error).__name__, error, store.position().offset, at.offset)
        (points / "tasks.disk_full").unlink()
        while (folder / "filler").exists():
            threading.Event().wait(0.05)
        store.advance(at, after, changes)
        print(store.position().offset == turn)
        break
    at = after
"""


@pytest.mark.long
def test_a_store_on_a_full_disk_has_no_space_and_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    folder, points = tmp_path / "settling", tmp_path / "points"
    points.mkdir()
    program = [sys.executable, "-P", "-c", ON_FULL_DISK, str(folder), str(points)]
    command = on_small_disk(program, folder)
    if command == program:
        return  # No user of this machine may mount a file system in a namespace of its own.
    environment = {"PYTHONPATH": str(PROJECT_ROOT), FOLDER_VARIABLE: str(points), "PATH": "/usr/bin:/bin"}
    done: subprocess.CompletedProcess[str] = run_program(command, env=environment)
    assert done.returncode == 0, done.stderr
    error, room = done.stdout.splitlines()
    assert store_faults._NO_SPACE in error
    offset, known = error.split()[-2:]
    assert offset == known, "nothing of the change that failed is in the store"
    assert room == "True"
