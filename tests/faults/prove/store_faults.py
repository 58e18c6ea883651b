"""Faults of the local state stores: deleted, cut off, replaced by an old copy, elsewhere, on a full disk.

Each fault is a generator. It is resumed often, and it ends when a task, or a gateway, has met the fault and
dealt with it. It yields whether the fault was done and only its end is to come. If it is closed before, it
undoes what lasts, and the fault is not counted.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Final

import lmdb

from schemas.state_store.gateway_store import GatewayStore
from schemas.state_store.local_store import StoreDamaged
from schemas.state_store.partition_store import PartitionStore
from tests.faults.prove.crash_points import arm
from tests.faults.prove.crashing_tasks import ELSEWHERE, TASKS
from tests.faults.prove.schedule import REPLACE, TRUNCATE
from trunkline_agent.errors import TrunklineError

_PAGE: Final = 4096
# At least so old is a copy that comes back.
_OLD_S: Final = 2.0
# Armed while nothing more fits on the disk of the stores.
DISK_FULL: Final = "disk_full"
_NO_SPACE: Final = "No space left on device"

Stages = Generator[bool, None, None]
Known = dict[Path, int]
"""The folder of each store that tasks have brought forward, and its offset."""


def _unless_gone() -> AbstractContextManager[None]:
    """Return a context that ignores that a task makes a store, or deletes it, at the same moment."""
    return suppress(OSError, lmdb.Error)


def known_stores(folder: Path) -> Known:
    """Return the stores below `folder` that have a position beyond the beginning, by their own folder."""
    found: Known = {}
    for file in folder.glob("partition-*/data.mdb"):
        with _unless_gone(), suppress(StoreDamaged):
            with closing(PartitionStore(file.parent)) as store:
                position = store.position()
            if position is not None and position.offset:
                found[file.parent] = position.offset
    return found


def _until(condition: Callable[[], object], *, is_done: bool = False) -> Stages:
    while not condition():
        yield is_done


def _while_it_lasts(seconds: float, *, is_done: bool = False) -> Stages:
    until = time.monotonic() + seconds
    return _until(lambda: time.monotonic() >= until, is_done=is_done)


def deleted(folder: Path) -> Stages:
    """Delete all stores."""
    yield from _until(lambda: known_stores(folder))
    hit = known_stores(folder)
    for at in hit:
        shutil.rmtree(at, ignore_errors=True)
    yield from _until(lambda: known_stores(folder).keys() & hit.keys(), is_done=True)


def truncated(folder: Path) -> Stages:
    """Cut off the second half of each store's file, between two changes of it.

    In the middle of a change, its writer would fill the hole with zeros. LMDB cannot notice that.
    """
    yield from _until(lambda: known_stores(folder))
    hit = known_stores(folder)
    for at in hit:
        file = at / "data.mdb"
        with _unless_gone(), closing(lmdb.open(str(at), create=False)) as store, store.begin(write=True):
            os.truncate(file, file.stat().st_size // 2 // _PAGE * _PAGE)
    yield from _until(lambda: known_stores(folder).keys() & hit.keys(), is_done=True)


def replaced(folder: Path) -> Stages:
    """Put copies of the stores in their place that are older by some commits."""
    yield from _until(lambda: known_stores(folder))
    old = known_stores(folder)
    for at in old:
        _copy_of(at).mkdir()
        with _unless_gone(), closing(lmdb.open(str(at), create=False)) as store:
            store.copy(str(_copy_of(at)))
            shutil.copy(at / "boot_id", _copy_of(at))
    yield from _while_it_lasts(_OLD_S)
    yield from _until(lambda: _beyond(folder, old))
    hit = _beyond(folder, old)
    for at in hit:
        yield from _until(functools.partial(_put_back, at))
    yield from _until(lambda: _are_at(folder, hit), is_done=True)


def _beyond(folder: Path, old: Known) -> Known:
    """Return the stores among `old` that tasks have brought further forward."""
    return {at: offset for at, offset in known_stores(folder).items() if at in old and offset > old[at]}


def _are_at(folder: Path, wanted: Known) -> bool:
    """Return whether one of these stores has reached its offset."""
    return any(known_stores(folder).get(at, 0) >= offset for at, offset in wanted.items())


def _copy_of(at: Path) -> Path:
    return at.parent.with_name(f"copy-of-{at.name}")


def _put_back(at: Path) -> bool:
    """Replace a store's folder by its copy. Return False if a task has made a new one in the meantime."""
    shutil.rmtree(at, ignore_errors=True)
    try:
        _copy_of(at).rename(at)
    except OSError:
        return False
    return True


def elsewhere(folder: Path, points: Path, for_s: float) -> Stages:
    """Let tasks use other stores for some seconds, and then these again, which lag behind."""
    yield from _until(lambda: known_stores(folder))
    other = folder.with_name(f"{folder.name}-{ELSEWHERE}")
    marker = f"{TASKS}.{ELSEWHERE}"
    arm(points, marker)
    try:
        yield from _until(lambda: known_stores(other))
        yield from _while_it_lasts(for_s)
    finally:
        (points / marker).unlink(missing_ok=True)
    left = {folder / at.name: offset for at, offset in known_stores(other).items()}
    yield from _until(lambda: _are_at(folder, left), is_done=True)


def on_full_disk(points: Path, log: Path, for_s: float) -> Stages:
    """Let no more byte fit on the disk of the stores until a task has failed for it, and some seconds longer.

    Args:
        points: The folder of the markers.
        log: The log of the streaming jobs.
        for_s: For how long it goes on after the failure.
    """
    seen = log.stat().st_size if log.exists() else 0
    marker = f"{TASKS}.{DISK_FULL}"

    def has_failed() -> bool:
        if not log.exists():
            return False
        with log.open("rb") as file:
            file.seek(seen)
            return _NO_SPACE.encode() in file.read()

    arm(points, marker)
    try:
        yield from _until(has_failed)
        yield from _while_it_lasts(for_s, is_done=True)
    finally:
        (points / marker).unlink(missing_ok=True)


def records_in(folder: Path) -> int:
    """Return how many records the store of a gateway has, 0 without one that can be read."""
    if (folder / "data.mdb").exists():
        with _unless_gone(), suppress(TrunklineError), closing(GatewayStore(folder)) as store:
            if (place := store.position()) is not None:
                return sum(place.offsets.values())
    return 0


def of_gateway(how: str, folder: Path, kill: Callable[[], None]) -> Stages:
    """Kill a gateway, and spoil its store before it starts again.

    Args:
        how: Delete the store, cut off half of its file, or put an older copy in its place.
        folder: The folder of the store.
        kill: Ends the gateway's process. Nothing may start it again before the next stage.
    """
    yield from _until(lambda: records_in(folder))
    if how == REPLACE:
        old = records_in(folder)
        _copy_of(folder).mkdir()
        with closing(lmdb.open(str(folder), create=False)) as store:
            store.copy(str(_copy_of(folder)))
        yield from _until(lambda: records_in(folder) > old)
    kill()
    hit, file = records_in(folder), folder / "data.mdb"
    with _unless_gone():
        if how == TRUNCATE:
            os.truncate(file, file.stat().st_size // 2 // _PAGE * _PAGE)
        else:
            shutil.rmtree(folder)
        if how == REPLACE:
            _copy_of(folder).rename(folder)
    yield from _until(lambda: records_in(folder) >= hit, is_done=True)
