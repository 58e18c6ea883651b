"""Views built anew from the ledger, and the check that refolds its bytes, without Spark."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from jobs import rebuild_views, refold
from jobs.build_views import prepare
from jobs.driver.programs import WriterClaim
from jobs.rebuild_views import Removals, rebuild
from jobs.views.view_changes import RowChange, changes_of
from jobs.views.view_tables import REBUILD, ViewTable, WrongViewTable, are_complete, open_tables
from schemas.fold.settled import FOLD_VERSION
from schemas.settings.settings import Settings, StorageSettings, settings_environment
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from schemas.streams.job.job_registry import (
    REGISTRY_JOBS,
    JobCancellation,
    JobPick,
)
from schemas.streams.session.sessions import SessionCreation
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.ledger import LEDGER
from schemas.wire.record import OutgoingRecord
from tests.jobs.settled_backbone import Backbone
from tests.jobs.topic_load import event, raw_event, registration
from trunkline_agent.errors import NotFound, Refused

pytestmark = pytest.mark.long


@pytest.fixture
def backbone(made_once: Backbone, tmp_path: Path) -> Backbone:
    """A copy of the ledger and its views for one test."""
    return made_once.copy(tmp_path / "data")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """A ledger with some micro-batches of every kind of trouble, and its views. No test changes it."""
    made = Backbone(tmp_path_factory.mktemp("backbone") / "data")
    draw = random.Random(7)
    jobs = [f"{number:08x}" for number in range(12)]
    made.settle(*(registration(job, made.keyring) for job in jobs))
    for _ in range(6):
        records: list[OutgoingRecord] = []
        for job in draw.sample(jobs, 8):
            kind = draw.choice(["started", "progress", "progress", "completed"])
            records.append(
                event(job, draw.randint(1, 5), kind, detail="sk-" + "a" * 40 if kind == "started" else "on")
            )
        records.append(raw_event(jobs[0], b"\xff{"))
        records.append(JobPick(job_id=draw.choice(jobs), session="s1").record(principal="s1", door="http"))
        records.append(
            JobCancellation(job_id=draw.choice(jobs), request_id="c1").record(door="cli", principal="operator")
        )
        records.append(SessionCreation(session="s1", request_id="r1").record(door="cli", principal="ann"))
        made.settle(*records)
    made.build()
    return made


@pytest.mark.requirement("CM-04")
def test_a_refold_of_the_bytes_says_what_ledger_and_views_say(backbone: Backbone) -> None:
    found = backbone.check()
    assert (found.different, found.differences, found.newer) == (0, [], 0)
    ledger = DeltaTable(backbone.settings.table_path(LEDGER)).to_pyarrow_table()
    assert found.records == ledger.num_rows
    assert {"accepted", "duplicate", "rejected"} == set(ledger["verdict"].to_pylist())
    assert any(ledger["value_sealed"].to_pylist()), "the check opens sealed values"
    assert found.rows == {table: len(rows) for table, rows in backbone.state().items()}


def test_what_an_earlier_version_of_the_fold_has_settled_stands_and_the_refold_goes_on_from_there(
    backbone: Backbone,
) -> None:
    path = backbone.settings.table_path(LEDGER)
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    for row in rows:
        row["fold_version"] = FOLD_VERSION - 1
        if row["reason"] is not None:
            row["reason"] = "a_reason_of_old"
    write_deltalake(path, pa.Table.from_pylist(rows, schema=LEDGER_ARROW), mode="overwrite")
    for table in VIEW_TABLES:
        shutil.rmtree(backbone.settings.table_path(table))
    jobs = sorted({row["stream_id"] for row in rows if row["stream_kind"] == "job"})
    backbone.settle(*(event(job, 9, "progress") for job in jobs), registration("000000ff", backbone.keyring))
    backbone.build()
    found = backbone.check()
    assert (found.differences, found.adopted) == ([], len(rows))
    assert found.records > len(rows)
    # It does look at what came later, with what came before in mind.
    newest = backbone.state()[REGISTRY_JOBS]
    assert {row["last_seq"] for row in newest if row["status"] == "running"} == {9}


def test_the_check_finds_rows_in_whatever_files_they_lie(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refold, "_WINDOW", 3)
    path = backbone.settings.table_path(LEDGER)
    rows = DeltaTable(path).to_pyarrow_table()
    order = list(range(rows.num_rows))
    random.Random(1).shuffle(order)
    write_deltalake(path, rows.take(order), mode="overwrite")
    assert backbone.check().differences == []


def test_the_check_leaves_out_what_the_views_have_not_seen_yet(backbone: Backbone) -> None:
    backbone.settle(registration("000000ff", backbone.keyring), event("000000ff", 1, "started"))
    assert backbone.check().differences == []
    shutil.rmtree(backbone.settings.table_path(REGISTRY_JOBS))
    ahead = open_tables(backbone.settings)[REGISTRY_JOBS]
    ledger = DeltaTable(backbone.settings.table_path(LEDGER)).to_pyarrow_table()
    ahead.apply(changes_of(ledger).tables[REGISTRY_JOBS])
    found = backbone.check()
    assert (found.differences, found.newer) == ([], 1)


def change_ledger(backbone: Backbone, updates: dict[str, str], predicate: str) -> None:
    DeltaTable(backbone.settings.table_path(LEDGER)).update(updates=updates, predicate=predicate)


def change_jobs(backbone: Backbone, updates: dict[str, str], predicate: str) -> None:
    DeltaTable(backbone.settings.table_path(REGISTRY_JOBS)).update(updates=updates, predicate=predicate)


def delete_from(table: str, predicate: str) -> Callable[[Backbone], object]:
    return lambda backbone: DeltaTable(backbone.settings.table_path(table)).delete(predicate)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (
            lambda b: change_jobs(b, {"last_detail": "'other'"}, "job_id = '00000003'"),
            "00000003: last_detail is 'other'",
        ),
        (lambda b: change_jobs(b, {"last_offset": "0"}, "job_id = '00000001'"), "00000001: last_offset is 0"),
        (delete_from(REGISTRY_JOBS, "job_id = '00000004'"), "00000004: is missing"),
        (
            delete_from(STREAM_ENTRIES, "stream_id = '00000004' AND entry = 'job'"),
            "job/00000004/job: is missing",
        ),
        (
            lambda b: change_jobs(b, {"job_id": "'0000aaaa'"}, "job_id = '00000005'"),
            "0000aaaa: should not be there",
        ),
        (
            lambda b: change_ledger(
                b, {"verdict": "'rejected'"}, "stream_id = '00000002' AND type = 'job.registered'"
            ),
            "verdict is 'rejected', refolded 'accepted'",
        ),
        (lambda b: change_ledger(b, {"status_after": "'x'"}, "verdict = 'duplicate'"), "status_after is 'x'"),
        (
            lambda b: change_ledger(b, {"changes": "NULL"}, "type = 'job.registered'"),
            "other changes than refolded",
        ),
        (
            lambda b: change_ledger(b, {"entries": "NULL"}, "type = 'job.registered'"),
            "other entries than refolded",
        ),
        (lambda b: change_ledger(b, {"value": "X'7b7d'"}, "type = 'job.registered'"), "refolded 'rejected'"),
    ],
)
def test_the_check_names_a_planted_difference(
    backbone: Backbone, plant: Callable[[Backbone], object], says: str
) -> None:
    plant(backbone)
    found = backbone.check()
    assert found.different > 0
    assert any(says in line for line in found.differences), found.differences


def test_an_older_change_that_is_read_after_the_removal_of_its_row_is_outdated() -> None:
    def change(offset: int, *, is_removal: bool = False) -> RowChange:
        return RowChange(0, offset, None if is_removal else {"key": "m/1"})

    def is_outdated(key: str, change: RowChange, table: str = STREAM_ENTRIES) -> bool:
        return removals.is_outdated(table, ("mailbox/a", key), change)

    with closing(Removals()) as removals:
        assert not is_outdated("m/1", change(7, is_removal=True))
        assert is_outdated("m/1", change(6))
        assert is_outdated("m/1", change(5, is_removal=True))
        assert is_outdated("m/1", change(6))
        assert not is_outdated("m/1", change(8))
        assert not is_outdated("m/2", change(6))
        assert not is_outdated("m/1", change(6), "mailbox")


def test_all_tables_deleted_a_rebuild_brings_them_back_equal(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild_views, "_CHUNK_ROWS", 10)
    before = backbone.state()
    for table in VIEW_TABLES:
        shutil.rmtree(backbone.settings.table_path(table))
    progress = rebuild(backbone.settings)
    assert backbone.state() == before
    assert progress.ledger_version == DeltaTable(backbone.settings.table_path(LEDGER)).version()
    assert open_tables(backbone.settings)[STREAM_ENTRIES].progress == progress
    assert backbone.check().differences == []
    assert sorted(path.name for path in Path(backbone.settings.tables_root).iterdir()) == sorted(
        [LEDGER, *VIEW_TABLES]
    )


def test_a_table_from_before_rotations_is_refused_and_built_anew_with_the_new_columns_empty(
    backbone: Backbone,
) -> None:
    before, newer = backbone.state(), ("secret_rotations", "old_secret_ends_at")
    path = backbone.settings.table_path(LEDGER)
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    for row in rows:
        row["fold_version"] = FOLD_VERSION - 1
        changes = json.loads(row["changes"] or "[]")
        for change in changes:
            change["row"] = {name: value for name, value in change["row"].items() if name not in newer}
        row["changes"] = json.dumps(changes) if changes else None
    write_deltalake(path, pa.Table.from_pylist(rows, schema=LEDGER_ARROW), mode="overwrite")
    jobs = backbone.settings.table_path(REGISTRY_JOBS)
    narrow = DeltaTable(jobs).to_pyarrow_table().drop_columns(list(newer))
    write_deltalake(jobs, narrow, mode="overwrite", schema_mode="overwrite", partition_by=["shelf"])
    with pytest.raises(WrongViewTable, match="rebuild_views"):
        open_tables(backbone.settings)
    rebuild(backbone.settings)
    older = [{**row, "fold_version": FOLD_VERSION - 1} for row in before[STREAM_ENTRIES]]
    assert backbone.state() == {**before, STREAM_ENTRIES: older}
    assert backbone.check().differences == []


def test_a_rebuild_mends_a_table_that_differs(backbone: Backbone) -> None:
    before = backbone.state()
    delete_from(REGISTRY_JOBS, "job_id > '00000004'")(backbone)
    rebuild(backbone.settings)
    assert backbone.state() == before


@pytest.mark.parametrize("missing", [(), (REGISTRY_JOBS, STREAM_ENTRIES), VIEW_TABLES[:-1], VIEW_TABLES[1:]])
def test_a_rebuild_killed_before_any_of_its_commits_is_seen_and_repeated(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, missing: Sequence[str]
) -> None:
    before = backbone.state()
    for table in missing:
        shutil.rmtree(backbone.settings.table_path(table))
    real = DeltaTable.create_write_transaction
    # Killed at one table after the other, each time on top of what the kill before has left.
    for killed_at in range(len(VIEW_TABLES)):
        left = iter(range(killed_at, -1, -1))

        def commit(table: DeltaTable, actions: Any, mode: str, left: Any = left, **more: Any) -> None:
            if mode == "overwrite" and next(left) == 0:
                raise KeyboardInterrupt
            real(table, actions, mode, **more)

        monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)
        with pytest.raises(KeyboardInterrupt):
            rebuild(backbone.settings)
        assert not are_complete(backbone.settings), "so the job does not go on from half of it"
    monkeypatch.undo()
    prepare(backbone.settings)
    assert backbone.state() == before
    assert are_complete(backbone.settings)


def test_a_first_build_killed_before_its_progress_is_noted_is_seen_and_repeated(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = backbone.state()
    for table in VIEW_TABLES:
        shutil.rmtree(backbone.settings.table_path(table))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ViewTable, "note", killed)
    with pytest.raises(KeyboardInterrupt):
        rebuild(backbone.settings)
    assert not are_complete(backbone.settings)
    monkeypatch.undo()
    prepare(backbone.settings)
    assert backbone.state() == before
    assert are_complete(backbone.settings)


def test_a_rebuild_that_fails_before_it_has_built_all_leaves_the_views_as_they_were(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = backbone.state()
    monkeypatch.setattr(rebuild_views, "chunks", lambda _: iter(["no rows"]))
    with pytest.raises((AttributeError, TypeError)):
        rebuild(backbone.settings)
    assert are_complete(backbone.settings)
    assert backbone.state() == before
    # One that was killed has left a table empty. A second one that fails must not make it pass for whole.
    shutil.rmtree(backbone.settings.table_path(REGISTRY_JOBS))
    open_tables(backbone.settings)
    Path(backbone.settings.tables_root, f"{REBUILD}killed", REGISTRY_JOBS).mkdir(parents=True)
    with pytest.raises((AttributeError, TypeError)):
        rebuild(backbone.settings)
    assert not are_complete(backbone.settings)
    monkeypatch.undo()
    prepare(backbone.settings)
    assert backbone.state() == before


def test_a_rebuild_brings_a_table_of_an_earlier_version_to_this_one(backbone: Backbone) -> None:
    path = Path(backbone.settings.table_path(REGISTRY_JOBS))
    for suffix in (".new", ".old"):
        shutil.copytree(path, path.with_name(f"{path.name}{suffix}"))
    table = DeltaTable(path)
    table.alter.set_table_properties({"delta.dataSkippingStatsColumns": "owner"})
    rebuild(backbone.settings)
    properties = DeltaTable(path).metadata().configuration
    assert "job_id" in properties["delta.dataSkippingStatsColumns"]
    assert not list(path.parent.glob(f"{path.name}.*"))
    rows = DeltaTable(path).to_pyarrow_table()
    shutil.rmtree(path)
    write_deltalake(path, rows, partition_by=["status"])
    with pytest.raises(Refused, match="as an earlier version did it"):
        rebuild(backbone.settings)


def test_a_view_table_that_cannot_be_read_is_named_and_must_be_deleted_first(backbone: Backbone) -> None:
    before = backbone.state()
    path = Path(backbone.settings.table_path(REGISTRY_JOBS))
    for file in (path / "_delta_log").iterdir():
        file.write_text("damaged")
    with pytest.raises(Refused, match=f"{REGISTRY_JOBS} cannot be read: .*Delete it"):
        rebuild(backbone.settings)
    shutil.rmtree(path)
    rebuild(backbone.settings)
    assert backbone.state() == before


def test_tables_at_a_uri_are_built_anew_as_those_on_a_path_are(backbone: Backbone) -> None:
    before, root = backbone.state(), Path(backbone.settings.tables_root)
    at_uri = backbone.settings.model_copy(update={"storage": StorageSettings(tables=root.as_uri())})
    shutil.rmtree(root / VIEW_TABLES[-1])
    for _ in range(2):
        rebuild(at_uri)
        assert backbone.state() == before
        assert are_complete(at_uri)


def test_without_a_ledger_or_views_it_says_so(tmp_path: Path) -> None:
    empty = Backbone(tmp_path / "none")
    with pytest.raises(NotFound, match="no ledger"):
        rebuild(empty.settings)
    empty.settle(registration("00000001", empty.keyring))
    with pytest.raises(NotFound, match="rebuild_views"):
        empty.check()


def run_program(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    for name, value in settings_environment(settings).items():
        monkeypatch.setenv(name, value)
    code = rebuild_views.main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_program_answers_by_exit_code_and_json_and_waits_for_no_writer(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*arguments: str, settings: Settings = backbone.settings) -> tuple[int, str, str]:
        return run_program(settings, monkeypatch, capsys, *arguments)

    assert run()[0] == 0
    code, out, _ = run("--check", "--json")
    assert (code, json.loads(out)["different"]) == (0, 0)
    with WriterClaim(backbone.settings):
        code, _, err = run()
        assert code == 4
        assert "trunkline down" in err
        assert run("--check")[0] == 0
    change_jobs(backbone, {"events": "99"}, "true")
    code, out, _ = run("--check")
    assert code == 4
    assert "events is 99" in out
    code, out, _ = run("--check", "--json")
    assert (code, json.loads(out)["different"]) == (4, 12)
    nothing = Settings(data_dir=tmp_path / "none", master_key_file=backbone.settings.key_file)
    code, _, err = run("--check", settings=nothing)
    assert code == 3
    assert "no ledger" in err
