"""The index of view keys: whatever happens to it, the table's rows stay right. No row is mocked or planted."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from jobs.views import view_tables
from jobs.views.key_index import _name as stored_name
from jobs.views.view_changes import RowChange
from jobs.views.view_tables import SHELF, ViewTable, index_path
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from tests.broker_processes import PROJECT_ROOT
from tests.jobs.test_rebuild_views import Backbone
from tests.jobs.topic_load import event, registration

pytestmark = pytest.mark.long
NAMES = [f"{number:08x}" for number in range(60)]


@pytest.fixture(autouse=True)
def small_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shelves of a few rows, so that a test fills many."""
    monkeypatch.setattr(view_tables, "SHELF_ROWS", 5)
    monkeypatch.setattr(view_tables, "_RESTING_ROWS", 40)


def change(name: str, offset: int, *, removed: bool = False) -> RowChange:
    cells = {"stream_kind": "job", "stream_id": name, "entry": "job", "value": b"v", "fold_version": 9}
    return RowChange(0, offset, None if removed else cells)


class Table:
    """A table with its index, and the rows that it should have."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.model: dict[str, int] = {}
        self.offset = 0
        self.table = self.opened()

    def opened(self) -> ViewTable:
        return ViewTable(str(self.folder / "table"), STREAM_ENTRIES, self.folder / "index")

    @property
    def index(self) -> Path:
        return self.folder / "index"

    def reopen(self) -> None:
        self.table.close()
        self.table = self.opened()

    def work(self, rounds: int = 6) -> None:
        """Change, add and remove rows; tidy now and then."""
        for _ in range(rounds):
            self.offset += 1
            batch = {}
            for name in self.draw.sample(NAMES, 9):
                removed = self.draw.random() < 0.2
                batch["job", name, "job"] = change(name, self.offset, removed=removed)
                if removed:
                    self.model.pop(name, None)
                else:
                    self.model[name] = self.offset
            self.table.apply(batch)
        self.table.tidy(24)

    def check(self) -> None:
        """The table has the right rows, each once; the index knows each and no other."""
        columns = ["stream_id", SHELF, "last_offset"]
        rows = DeltaTable(str(self.folder / "table")).to_pyarrow_dataset().to_table(columns=columns).to_pylist()
        assert sorted((row["stream_id"], row["last_offset"]) for row in rows) == sorted(self.model.items())
        keys = [("job", name, "job") for name in NAMES]
        held = self.table._index.held(self.table.delta, keys)
        stored = {row["stream_id"]: (row[SHELF], row["last_offset"]) for row in rows}
        assert {key[1]: tuple(one) for key, one in held.items()} == stored
        assert +self.table._sizes == Counter(row[SHELF] for row in rows)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A table with a history."""
    made = Table(tmp_path)
    made.work()
    return made


def deleted(table: Table) -> None:
    table.table.close()
    shutil.rmtree(table.index)
    table.table = table.opened()


def deleted_in_use(table: Table) -> None:
    shutil.rmtree(table.index)


def truncated(table: Table) -> None:
    table.table.close()
    os.truncate(table.index / "data.mdb", 8192)
    table.table = table.opened()


def truncated_in_use(table: Table) -> None:
    os.truncate(table.index / "data.mdb", 8192)


def no_database(table: Table) -> None:
    table.table.close()
    (table.index / "data.mdb").write_bytes(b"\x00" * 65536)
    table.table = table.opened()


def values_changed(table: Table) -> None:
    """The last byte of each value is another one."""
    table.table.close()
    raw = bytearray((table.index / "data.mdb").read_bytes())
    for name in table.model:
        key = stored_name(("job", name, "job"))
        found = [at + len(key) + 15 for at in range(len(raw)) if raw.startswith(key, at)]
        assert found
        for at in found:
            raw[at] ^= 1
    (table.index / "data.mdb").write_bytes(raw)
    table.table = table.opened()


def of_another_time(table: Table, keep_h: int = 24) -> None:
    """An older copy is put back."""
    table.table.close()
    old = table.folder / "old"
    shutil.copytree(table.index, old)
    table.table = table.opened()
    for _ in range(2):
        table.work(3)
        table.table.tidy(keep_h)
    table.table.close()
    shutil.rmtree(table.index)
    old.rename(table.index)
    table.table = table.opened()


def too_old_to_follow(table: Table) -> None:
    """An older copy is put back, and the files since then are deleted."""
    of_another_time(table, keep_h=0)


def table_of_another_time(table: Table) -> None:
    """An older copy of the table is put back, and it goes on to more versions than the index has seen."""
    table.table.close()
    old, model = table.folder / "old", dict(table.model)
    shutil.copytree(table.folder / "table", old)
    table.table = table.opened()
    table.work(2)
    table.table.close()
    index = table.folder / "index of then"
    table.index.rename(index)
    shutil.rmtree(table.folder / "table")
    old.rename(table.folder / "table")
    table.model = model
    table.table = table.opened()
    table.work()
    table.table.close()
    shutil.rmtree(table.index)
    index.rename(table.index)
    table.table = table.opened()


def of_another_table(table: Table) -> None:
    other = Table(table.folder / "other", seed=2)
    other.work()
    other.table.close()
    table.table.close()
    shutil.rmtree(table.index)
    other.index.rename(table.index)
    table.table = table.opened()


def killed_in_use(table: Table) -> None:
    (table.index / "in_use").touch()
    makes_a_new_file(table)


def of_an_earlier_start(table: Table) -> None:
    (table.index / "boot_id").write_text("another start of the machine")
    makes_a_new_file(table)


def makes_a_new_file(table: Table) -> None:
    table.table.close()
    os.link(table.index / "data.mdb", kept := table.folder / "kept")
    table.table = table.opened()
    assert not kept.samefile(table.index / "data.mdb")


DAMAGE: list[Callable[[Table], None]] = [
    deleted,
    deleted_in_use,
    truncated,
    truncated_in_use,
    no_database,
    values_changed,
    of_another_time,
    too_old_to_follow,
    table_of_another_time,
    of_another_table,
    killed_in_use,
    of_an_earlier_start,
]


@pytest.mark.requirement("ST-20")
@pytest.mark.parametrize("damage", DAMAGE)
def test_an_index_that_is_damaged_or_of_another_time_or_table_costs_no_row(
    table: Table, damage: Callable[[Table], None]
) -> None:
    damage(table)
    table.work()
    table.check()
    table.reopen()
    table.check()


def every_index(backbone: Backbone) -> list[Path]:
    return [index_path(backbone.settings, name) for name in VIEW_TABLES]


def zeros(backbone: Backbone, old: Path) -> None:
    for index in every_index(backbone):
        (index / "data.mdb").write_bytes(b"\x00" * (index / "data.mdb").stat().st_size)


def cut_off(backbone: Backbone, old: Path) -> None:
    for index in every_index(backbone):
        os.truncate(index / "data.mdb", 12288)


def exchanged(backbone: Backbone, old: Path) -> None:
    """Each table has the index of another one."""
    shutil.rmtree(old)
    folder = backbone.settings.state_path / "views"
    folder.rename(old)
    folder.mkdir()
    for name, other in zip(VIEW_TABLES, [*VIEW_TABLES[1:], VIEW_TABLES[0]], strict=True):
        (old / other).rename(folder / name)


def put_back(backbone: Backbone, old: Path) -> None:
    shutil.rmtree(backbone.settings.state_path / "views")
    old.rename(backbone.settings.state_path / "views")


def nothing_left(backbone: Backbone, old: Path) -> None:
    shutil.rmtree(backbone.settings.state_path)


@pytest.mark.requirement("ST-20")
@pytest.mark.parametrize("damage", [nothing_left, zeros, cut_off, put_back, exchanged])
def test_views_equal_a_refold_after_their_indexes_were_damaged(
    tmp_path: Path, damage: Callable[[Backbone, Path], None]
) -> None:
    backbone, jobs = Backbone(tmp_path / "data"), [f"{number:08x}" for number in range(12)]
    for seq in range(1, 4):
        if seq == 1:
            backbone.settle(*(registration(job, backbone.keyring) for job in jobs))
        if seq == 2:
            shutil.copytree(backbone.settings.state_path / "views", tmp_path / "old")
        if seq == 3:
            damage(backbone, tmp_path / "old")
        backbone.settle(*(event(job, seq, "completed" if seq == 3 else "progress") for job in jobs[seq:]))
        backbone.build()
    found = backbone.check()
    assert (found.different, found.differences) == (0, [])
    assert found.rows[STREAM_ENTRIES] >= 2 * len(jobs)


@pytest.mark.requirement("ST-20")
@pytest.mark.parametrize("point", ["before", "during", "after"])
def test_a_crash_around_the_write_of_the_index_costs_no_row(table: Table, point: str) -> None:
    table.table.close()
    program = f"""
import os, signal
from pathlib import Path
from jobs.views import view_tables
from jobs.views.key_index import KeyIndex
from jobs.views.key_index import IndexStore
from tests.jobs.test_key_index import change
view_tables.SHELF_ROWS = 5

def dying(method, is_after):
    def called(*arguments):
        if is_after:
            method(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    return called

if {point!r} == "during":
    IndexStore.advance = dying(IndexStore.advance, True)
else:
    KeyIndex.advance = dying(KeyIndex.advance, {point!r} == "after")
folder = Path({str(table.folder)!r})
opened = view_tables.ViewTable(str(folder / "table"), "stream_entries", folder / "index")
changes = {{("job", f"{{n:08x}}", "job"): change(f"{{n:08x}}", 99, removed=n % 5 == 0) for n in range(30, 60)}}
opened.apply(changes)
"""
    died = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    table.offset = 99
    for number in range(30, 60):
        if number % 5:
            table.model[f"{number:08x}"] = 99
        else:
            table.model.pop(f"{number:08x}", None)
    assert (table.index / "in_use").exists() == (point == "during")
    table.table = table.opened()
    table.check()
    table.work()
    table.check()


@pytest.mark.requirement("ST-20")
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_full_disk_ends_the_write_and_later_all_rows_are_right(
    table: Table, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    monkeypatch.setattr(view_tables, "SHELF_ROWS", 2048)
    names = [f"{number:08x}" for number in range(len(NAMES), len(NAMES) + 5000)]
    batch = {("job", name, "job"): change(name, 99) for name in names}
    # Enough for the files of the table.
    with full_disk(200_000), pytest.raises(lmdb.Error, match="mdb_txn_commit"):
        table.table.apply(batch)
    stored = DeltaTable(str(table.folder / "table")).to_pyarrow_dataset().count_rows()
    assert stored == len(table.model) + len(names), "the table has the commit, the index does not"
    if is_restarted:
        table.reopen()
    assert not table.table.apply(batch)
    table.table.apply({key: change(key[1], 100, removed=True) for key in batch})
    table.offset = 100
    table.work()
    table.check()


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file of this process can become longer than `most` bytes: the kernel refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.requirement("ST-21")
def test_a_start_with_its_index_reads_no_row_and_one_without_reads_all(table: Table) -> None:
    table.table.close()
    data = table.folder / "table"
    for file in data.rglob("shelf=*/*.parquet"):
        file.unlink()
    table.table = table.opened()
    held = table.table._index.held(table.table.delta, [("job", name, "job") for name in table.model])
    assert {key[1]: one.offset for key, one in held.items()} == table.model
    table.table.close()
    shutil.rmtree(table.index)
    with pytest.raises(OSError, match="No such file"):
        table.opened()


@pytest.mark.requirement("ST-22")
def test_a_second_writer_fails_or_follows_and_no_row_is_written_twice(table: Table) -> None:
    other = ViewTable(str(table.folder / "table"), STREAM_ENTRIES, table.folder / "index of another machine")
    name = next(name for name in NAMES if name not in table.model)
    key = ("job", name, "job")
    other.apply({key: change(name, 500)})
    with pytest.raises(CommitFailedError):
        table.table.apply({key: change(name, 500)})
    table.model[name] = 500
    # Maintenance of delta-rs goes on after a commit of another writer. The index gets its keys all the same.
    table.table.compact_shelf(0)
    table.table.delta.update_incremental()
    assert not table.table.apply({key: change(name, 500)})
    table.reopen()
    table.check()
    table.offset = 500
    table.work()
    table.check()
