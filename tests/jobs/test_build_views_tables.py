"""One view table and its writer, without Spark: merging, shelves, tidying up, progress."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from jobs.views import view_tables
from jobs.views.view_changes import Key, RowChange, changes_of
from jobs.views.view_tables import SHELF, ViewTable, WrongViewTable, table_schema
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from schemas.streams.mailboxes.message import MAILBOX_VIEW
from schemas.streams.principal.principals import REGISTRY_PRINCIPALS
from schemas.tables.arrow_tables import LEDGER_ARROW, VIEW_ARROW
from schemas.tables.view_progress import NO_PROGRESS, ViewProgress, read_progress

pytestmark = pytest.mark.long

Changes = dict[Key, RowChange]


@pytest.fixture(autouse=True)
def small_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shelves of a few rows, so that a test fills many."""
    monkeypatch.setattr(view_tables, "SHELF_ROWS", 5)
    monkeypatch.setattr(view_tables, "_RESTING_ROWS", 40)


def principal(name: str, offset: int, *, removed: bool = False) -> RowChange:
    row = {
        "principal": name,
        "role": "viewer",
        "status": f"since {offset}",
        "token_sha256": "00",
        "added_by": "ann",
        "added_at": 1_790_000_000_000_000 + offset,
        "revoked_at": None if offset % 2 else offset,
    }
    return RowChange(0, offset, None if removed else row)


def entry(name: str, offset: int) -> RowChange:
    cells = {
        "stream_kind": "job",
        "stream_id": name,
        "entry": "job",
        "value": b"%d" % offset,
        "fold_version": 2,
    }
    return RowChange(1, offset, cells)


def opened(path: Path, table: str = REGISTRY_PRINCIPALS) -> ViewTable:
    """The table, opened for writing, with its index beside it."""
    return ViewTable(str(path), table, path.with_name(f"{path.name}-index"))


def offsets_of(path: Path, table: str = REGISTRY_PRINCIPALS) -> dict[str, int]:
    """Key and last offset of each stored row; fails on a key that is there twice."""
    name = "principal" if table == REGISTRY_PRINCIPALS else "stream_id"
    rows = DeltaTable(str(path)).to_pyarrow_dataset().to_table(columns=[name, "last_offset"]).to_pylist()
    found = {row[name]: row["last_offset"] for row in rows}
    assert len(found) == len(rows)
    return found


def shelves_of(path: Path) -> dict[str, int]:
    """The shelf of each principal."""
    rows = DeltaTable(str(path)).to_pyarrow_dataset().to_table(columns=["principal", SHELF]).to_pylist()
    return {row["principal"]: row[SHELF] for row in rows}


def files_of(path: Path) -> set[str]:
    return set(DeltaTable(str(path)).file_uris())


def named(numbers: Iterable[int], offset: int) -> Changes:
    return {(f"p{number}",): principal(f"p{number}", offset) for number in numbers}


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_batches_repetitions_restarts_and_tidying_ends_in_the_newest_rows(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    path = tmp_path / "t"
    table = opened(path)
    model: dict[str, int] = {}
    batches: list[Changes] = []
    for number in range(40):
        batch: Changes = {}
        for name in draw.sample([f"p{n}" for n in range(60)], draw.randint(1, 12)):
            removed = draw.random() < 0.15
            batch[name,] = principal(name, number, removed=removed)
            if removed:
                model.pop(name, None)
            else:
                model[name] = number
        batches.append(batch)
        table.apply(batch)
        if draw.random() < 0.3:
            table.apply(batch)
        if draw.random() < 0.2:
            table.close()
            table = opened(path)
        if draw.random() < 0.2:
            table.tidy(1)
        assert offsets_of(path) == model
    assert len(table) == len(model)
    held = table._index.held(table.delta, [(f"p{number}",) for number in range(60)])
    assert {key[0]: one.offset for key, one in held.items()} == model
    assert {key[0]: one.shelf for key, one in held.items()} == shelves_of(path)
    assert +table._sizes == Counter(shelves_of(path).values())
    rows = DeltaTable(str(path)).to_pyarrow_dataset().to_table(columns=VIEW_ARROW[REGISTRY_PRINCIPALS].names)
    for row in rows.cast(VIEW_ARROW[REGISTRY_PRINCIPALS]).to_pylist():
        assert row["status"] == f"since {row['last_offset']}"
        assert (row["revoked_at"] is None) == bool(row["last_offset"] % 2)


def test_a_batch_applied_again_or_late_commits_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = opened(path)
    table.apply(named(range(3), 7))
    version = DeltaTable(str(path)).version()
    assert not table.apply(named(range(3), 7))
    table.close()
    table = opened(path)
    assert not table.apply(named(range(3), 6))
    assert not table.apply({("gone",): principal("gone", 9, removed=True)})
    assert DeltaTable(str(path)).version() == version
    assert offsets_of(path) == {"p0": 7, "p1": 7, "p2": 7}


def test_a_merge_leaves_the_files_of_rows_that_do_not_change_alone(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = opened(path)
    table.apply(named(range(20), 1))
    before = files_of(path)
    assert len(before) == 4, "a file a shelf"
    table.apply(named([7], 2))
    assert len(before - files_of(path)) == 1, "the row has left its shelf, the others were not touched"
    table.apply(named([7], 3))
    table.apply(named([7], 4))
    assert len(before - files_of(path)) == 1, "it is in the current shelf from then on"
    assert offsets_of(path) == {**{f"p{n}": 1 for n in range(20)}, "p7": 4}


def test_many_appends_leave_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_tables, "SHELF_ROWS", 1000)
    path = tmp_path / "t"
    table = opened(path)
    for number in range(100):
        table.apply(named([number], number))
    assert len(files_of(path)) <= 33
    assert len(offsets_of(path)) == 100


def test_shelves_that_rest_are_put_together_and_replaced_files_deleted(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = opened(path)
    table.apply(named(range(60), 1))
    assert len(files_of(path)) == 12
    table.tidy(0)
    assert len(files_of(path)) == 12, "they have only just been written"
    pinned = DeltaTable(str(path))
    table.tidy(24)
    assert len(files_of(path)) < 5
    assert offsets_of(path) == {f"p{n}": 1 for n in range(60)}
    assert pinned.to_pyarrow_table().num_rows == 60, "a reader that holds a version can finish"
    table.apply(named(range(0, 60, 7), 2))
    table.tidy(0)
    on_disk = {str(file) for file in path.rglob("*.parquet") if "_delta_log" not in file.parts}
    assert on_disk == {uri.removeprefix("file://") for uri in files_of(path)}
    assert offsets_of(path) == {f"p{n}": 2 if n % 7 == 0 else 1 for n in range(60)}


def test_every_commit_of_the_entries_says_how_far_they_are_also_that_of_maintenance(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = opened(path, STREAM_ENTRIES)
    assert read_progress(DeltaTable(str(path))) == NO_PROGRESS
    seen = []
    for number in range(1, 30):
        progress = ViewProgress({0: number, 3: 2 * number}, number)
        changes = {("job", f"{number:08x}", "job"): entry(f"{number:08x}", number)} if number % 3 else {}
        table.apply(changes, progress)
        seen.append((DeltaTable(str(path)).version(), progress))
        if number % 7 == 0:
            table.tidy(24)
            assert read_progress(DeltaTable(str(path))) == progress
    for version, progress in seen:
        assert read_progress(DeltaTable(str(path), version=version)) == progress
    table.close()
    assert opened(path, STREAM_ENTRIES).progress == seen[-1][1]
    assert len(offsets_of(path, STREAM_ENTRIES)) == 20


def test_a_table_with_other_columns_is_refused_with_what_to_do(tmp_path: Path) -> None:
    opened(tmp_path / "t").close()
    with pytest.raises(WrongViewTable, match="rebuild_views"):
        opened(tmp_path / "t", MAILBOX_VIEW)


def ledger(rows: list[dict[str, Any]]) -> pa.Table:
    plain = {"partition": 0, "stream_kind": "job", "stream_id": "0badcafe", "fold_version": 2}
    names = ("partition", "offset", "stream_kind", "stream_id", "fold_version", "changes", "entries")
    fields = [LEDGER_ARROW.field(name) for name in (*names, "accepted_offset")]
    return pa.Table.from_pylist([{**plain, **row} for row in rows], pa.schema(fields))


def test_the_last_change_of_a_key_counts_in_whatever_order_the_rows_come() -> None:
    def change(offset: int, status: str) -> dict[str, Any]:
        row = json.dumps({"status": status} if status else None)
        text = f'[{{"view":"mailbox","key":"default/ann/a/b","offset":{offset},"row":{row}}}]'
        return {
            "offset": offset + 1,
            "changes": text,
            "entries": [("e", b"%d" % offset)],
            "accepted_offset": offset,
        }

    rows = [change(5, "new"), change(3, "old"), {"offset": 9}, {"offset": 2, "partition": 3}]
    for order in (rows, rows[::-1]):
        changes = changes_of(ledger(order))
        key = ("default", "ann", "a/b")
        assert changes.tables[MAILBOX_VIEW] == {key: RowChange(0, 5, {"status": "new"})}
        stored = changes.tables[STREAM_ENTRIES]["job", "0badcafe", "e"]
        assert (stored.offset, stored.row and stored.row["value"]) == (5, b"5")
        assert changes.next_offsets == {0: 10, 3: 3}
    removed = changes_of(ledger([change(5, "x"), change(6, "")]))
    assert removed.tables[MAILBOX_VIEW][key].row is None


def test_a_write_that_failed_leaves_no_progress_for_maintenance_to_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(tmp_path / "entries", STREAM_ENTRIES)
    done = ViewProgress({1: 1}, 1)
    table.apply({("job", "a", "job"): entry("a", 0)}, done)

    def full(*given: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ViewTable, "_merge", full)
    with pytest.raises(OSError, match="space"):
        table.apply({("job", "a", "job"): entry("a", 5)}, ViewProgress({1: 6}, 9))
    table.compact_shelf(0)
    table.tidy(1)
    assert read_progress(DeltaTable(str(tmp_path / "entries"))).offsets == done.offsets
    assert read_progress(DeltaTable(str(tmp_path / "entries"))).ledger_version == done.ledger_version


def test_a_table_from_before_comments_takes_appends_merges_and_tidying(tmp_path: Path) -> None:
    path = tmp_path / "t"
    columns = pa.schema([field.remove_metadata() for field in table_schema(REGISTRY_PRINCIPALS)])
    DeltaTable.create(str(path), columns, partition_by=[SHELF])
    for offset in range(30):
        table = opened(path)
        table.apply(named(range(offset, offset + 3), offset))
        table.close()
    table = opened(path)
    table.tidy(0)
    table.tidy(0)
    assert offsets_of(path) == {f"p{number}": min(number, 29) for number in range(32)}
    operations = {commit["operation"] for commit in table.delta.history()}
    assert {"WRITE", "MERGE"} <= operations


@pytest.mark.parametrize("name", VIEW_TABLES)
def test_each_column_of_a_new_table_has_a_comment(tmp_path: Path, name: str) -> None:
    fields = opened(tmp_path / name, name).delta.schema().fields
    assert [field.name for field in fields if not field.metadata.get("comment")] == []
