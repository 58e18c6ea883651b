"""The views on a real ledger: rows, progress, repetition, crashes between two tables."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from jobs import build_views
from jobs.build_views import ViewBuilder, ViewThread, catch_up
from jobs.refold import check_views
from jobs.views.view_changes import key_columns
from jobs.views.view_tables import ViewTable, open_tables
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings, StorageSettings, ViewSettings
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from schemas.streams.job.job_registry import REGISTRY_JOBS, JobPick
from schemas.streams.session.sessions import REGISTRY_SESSIONS, SessionCreation
from schemas.tables.arrow_tables import VIEW_ARROW
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import ViewProgress, read_progress
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until
from tests.jobs.conftest import Rows
from tests.jobs.topic_load import append_all, event, registration
from trunkline_agent.errors import Refused

JOB = "0badcafe"


def rows_of(settings: Settings, table: str) -> list[dict[str, Any]]:
    """The rows of a view table by key."""
    columns = VIEW_ARROW[table].names
    rows = DeltaTable(settings.table_path(table)).to_pyarrow_dataset().to_table(columns=columns).to_pylist()
    return sorted(rows, key=lambda row: [row[name] for name in key_columns(table)])


def progress_of(settings: Settings) -> ViewProgress:
    return read_progress(DeltaTable(settings.table_path(STREAM_ENTRIES)))


def ledger_ends(ledger: Rows) -> dict[int, int]:
    """Per partition the offset after the last."""
    return {
        partition: offset + 1 for partition, offset in sorted((r["partition"], r["offset"]) for r in ledger)
    }


def versions(settings: Settings) -> dict[str, int]:
    return {table: DeltaTable(settings.table_path(table)).version() for table in VIEW_TABLES}


def session_created(session: str) -> OutgoingRecord:
    return SessionCreation(session=session, request_id="r1").record(door="cli", principal="ann")


@pytest.mark.requirement("JE-10")
@pytest.mark.requirement("JE-11")
@pytest.mark.requirement("JE-14")
def test_jobs_sessions_entries_and_progress_are_in_the_tables(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    settings = backbone_settings
    append_all(settings, [registration(JOB, keyring), session_created("s1")])
    append_all(settings, [JobPick(job_id=JOB, session="s1").record(principal="s1", door="http"), event(JOB, 1)])
    ledger = drain()
    catch_up(settings)
    (job,) = rows_of(settings, REGISTRY_JOBS)
    assert (job["job_id"], job["status"], job["session"], job["last_seq"]) == (JOB, "running", "s1", 1)
    by_position = {(row["partition"], row["offset"]): row for row in ledger}
    assert by_position[job["partition"], job["last_offset"]]["ce_id"] == event(JOB, 1).ce_id
    assert job["registered_at"] == next(r["logged_at"] for r in ledger if r["type"] == "job.registered")
    (session,) = rows_of(settings, REGISTRY_SESSIONS)
    assert (session["session"], session["status"]) == ("s1", "running")
    written = {(r["stream_id"], name): value for r in ledger for name, value in r["entries"] or ()}
    stored = {(r["stream_id"], r["entry"]): r["value"] for r in rows_of(settings, STREAM_ENTRIES)}
    assert stored == written
    progress = progress_of(settings)
    assert progress.offsets == ledger_ends(ledger)
    assert progress.ledger_version == DeltaTable(settings.table_path(LEDGER)).version()
    append_all(settings, [event(JOB, 2, "completed")])
    before = versions(settings)
    ledger = drain()
    catch_up(settings)
    (job,) = rows_of(settings, REGISTRY_JOBS)
    assert (job["status"], job["last_seq"], job["ended_by"]) == (
        "completed",
        2,
        event(JOB, 2, "completed").ce_id,
    )
    assert progress_of(settings).offsets == ledger_ends(ledger)
    changed = {table for table, version in versions(settings).items() if version != before[table]}
    assert changed == {REGISTRY_JOBS, STREAM_ENTRIES}, "only tables with changes are written"


def test_what_is_rejected_changes_no_row_and_still_moves_the_progress(
    drain: Callable[[], Rows], backbone_settings: Settings
) -> None:
    append_all(backbone_settings, [event(JOB, seq) for seq in range(1, 5)])
    ledger = drain()
    catch_up(backbone_settings)
    append_all(backbone_settings, [event("00000bad", 1)])
    ledger = drain()
    catch_up(backbone_settings)
    assert {row["verdict"] for row in ledger if row["type"] == "job.event"} == {"rejected"}
    assert rows_of(backbone_settings, REGISTRY_JOBS) == []
    assert progress_of(backbone_settings).offsets == ledger_ends(ledger)


class BoomError(Exception):
    """Raised in the middle of a round."""


def crash_and_restart(settings: Settings, monkeypatch: pytest.MonkeyPatch, table: str, point: str) -> None:
    """Catch up, failing before or after the commit of one table; then catch up again."""
    apply = ViewTable.apply

    def crashing(self: ViewTable, changes: Any, progress: Any = None) -> bool:
        if self.name == table and point == "before":
            raise BoomError
        done = apply(self, changes, progress)
        if self.name == table:
            raise BoomError
        return done

    monkeypatch.setattr(ViewTable, "apply", crashing)
    with pytest.raises(BoomError):
        catch_up(settings)
    monkeypatch.setattr(ViewTable, "apply", apply)
    catch_up(settings)


def test_a_crash_between_the_commits_of_two_tables_leaves_the_right_rows_after_a_restart(
    drain: Callable[[], Rows],
    backbone_settings: Settings,
    keyring: Keyring,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    settings = backbone_settings
    append_all(settings, [registration(JOB, keyring), event(JOB, 1, "started"), session_created("s1")])
    drain()
    catch_up(settings)
    append_all(settings, [event(JOB, 2), session_created("s2"), registration("0000000b", keyring)])
    drain()
    append_all(settings, [event(JOB, 3, "completed")])
    ledger = drain()
    for table in (REGISTRY_JOBS, REGISTRY_SESSIONS, STREAM_ENTRIES):
        for point in ("before", "after"):
            tables = tmp_path / f"{point}-{table}"
            shutil.copytree(settings.tables_root, tables)
            own = settings.model_copy(update={"storage": StorageSettings(tables=str(tables))})
            crash_and_restart(own, monkeypatch, table, point)
            jobs = {row["job_id"]: row["status"] for row in rows_of(own, REGISTRY_JOBS)}
            assert jobs == {JOB: "completed", "0000000b": "pending"}, (point, table)
            sessions = [row["session"] for row in rows_of(own, REGISTRY_SESSIONS)]
            assert sessions == ["s1", "s2"], (point, table)
            assert progress_of(own).offsets == ledger_ends(ledger), (point, table)
            check = check_views(own, DeltaTable(own.table_path(LEDGER)), keyring)
            assert (check.differences, check.newer) == ([], 0), (point, table)


def test_reading_commits_again_commits_nothing_to_the_registries(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    append_all(backbone_settings, [registration(JOB, keyring), event(JOB, 1, "started")])
    drain()
    catch_up(backbone_settings)
    rows, before = [rows_of(backbone_settings, table) for table in VIEW_TABLES], versions(backbone_settings)
    progress = progress_of(backbone_settings)
    open_tables(backbone_settings)[STREAM_ENTRIES].note(ViewProgress(progress.offsets, 0))
    catch_up(backbone_settings)
    assert [rows_of(backbone_settings, table) for table in VIEW_TABLES] == rows
    after = versions(backbone_settings)
    assert {table for table in VIEW_TABLES if after[table] != before[table]} <= {STREAM_ENTRIES}
    assert progress_of(backbone_settings).offsets == progress.offsets


def test_without_its_tables_the_job_builds_them_from_the_ledger_first(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    append_all(backbone_settings, [registration(JOB, keyring), event(JOB, 1, "started"), session_created("s1")])
    drain()
    catch_up(backbone_settings)
    rows = [rows_of(backbone_settings, table) for table in VIEW_TABLES]
    shutil.rmtree(backbone_settings.table_path(REGISTRY_JOBS))
    catch_up(backbone_settings)
    assert [rows_of(backbone_settings, table) for table in VIEW_TABLES] == rows


def test_the_thread_of_an_empty_ledger_waits_and_reads_what_comes(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    quick = backbone_settings.model_copy(update={"views": ViewSettings(interval_ms=100)})
    build_views.prepare(quick)
    views = ViewThread(quick, ViewBuilder(quick))
    views.start()
    try:
        wait_until(lambda: views.is_ready, 60, "the thread has seen that there is nothing")
        append_all(quick, [registration(JOB, keyring)])
        ledger = drain()
        wait_until(lambda: progress_of(quick).offsets == ledger_ends(ledger), 60, "the views are at the end")
        assert [row["status"] for row in rows_of(quick, REGISTRY_JOBS)] == ["pending"]
    finally:
        views.stop()
    assert views.failure is None


def test_views_that_are_ahead_of_the_ledger_are_refused(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    append_all(backbone_settings, [registration(JOB, keyring)])
    drain()
    build_views.prepare(backbone_settings)
    open_tables(backbone_settings)[STREAM_ENTRIES].note(ViewProgress({3: 1}, 9))
    with pytest.raises(Refused, match="rebuild_views"):
        catch_up(backbone_settings)


def test_commits_without_rows_are_passed_and_what_cannot_be_read_says_what_to_do(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    settings = backbone_settings
    append_all(settings, [registration(JOB, keyring)])
    drain()
    build_views.prepare(settings)
    builder = ViewBuilder(settings)
    while builder.build():
        pass
    append_all(settings, [event(JOB, 1, "started")])
    drain()
    DeltaTable(settings.table_path(LEDGER)).optimize.compact()
    append_all(settings, [event(JOB, 2)])
    ledger = drain()
    while builder.build():
        pass
    assert builder.progress.offsets == ledger_ends(ledger)
    builder.tables[STREAM_ENTRIES].note(ViewProgress({}, 0))
    builder.close()
    for file in Path(settings.table_path(LEDGER)).glob("*.parquet"):
        file.unlink()
    with pytest.raises(Refused, match="rebuild_views"):
        catch_up(settings)
