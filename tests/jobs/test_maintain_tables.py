"""Maintenance in the streaming driver: fewer files, no lost row, no conflict with the streams."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from jobs import build_views, maintain_tables, settle_events
from jobs.build_views import ViewBuilder, ViewThread
from jobs.maintain_tables import Maintenance, compact_ledger, tidy_ledger, tidy_views
from jobs.refold import check_views
from jobs.settling.ledger_sink import LedgerSink
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings, ViewSettings
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import read_progress
from tests.broker_processes import wait_until
from tests.jobs.conftest import DRAIN_LIMIT_S, Rows, ledger_rows
from tests.jobs.topic_load import append_all, event, registration
from tests.raw_records import read_to_end

JOBS = [f"{number:08x}" for number in range(10)]
APPEND, OPTIMIZE = "WRITE", "OPTIMIZE"


def ledger_of(settings: Settings) -> DeltaTable:
    return DeltaTable(settings.table_path(LEDGER))


def operations(settings: Settings) -> list[str]:
    """Return the operations of the ledger's commits, the oldest first."""
    return [commit["operation"] for commit in reversed(ledger_of(settings).history())]


def live_files(path: str) -> dict[str, int]:
    """The bytes of each data file of a table's newest version."""
    actions = pa.table(DeltaTable(path).get_add_actions())
    return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))


@pytest.mark.long
def test_compaction_leaves_few_files_and_writes_none_anew_in_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, full = 20_000, 160_000
    monkeypatch.setattr(maintain_tables, "_SMALL_FILE_BYTES", small)
    monkeypatch.setattr(maintain_tables, "_FULL_FILE_BYTES", full)
    path, appended, rewritten, most = str(tmp_path), 0, 0, 0
    for _ in range(18):
        known = live_files(path) if appended else {}
        for _ in range(4):
            write_deltalake(path, pa.table({"bytes": [os.urandom(3000)]}), mode="append")
        before = live_files(path)
        appended += sum(size for name, size in before.items() if name not in known)
        compact_ledger(DeltaTable(path))
        after = live_files(path)
        rewritten += sum(size for name, size in after.items() if name not in before)
        most = max(most, len(after))
    assert max(after.values()) > full / 2
    assert most <= appended / (full / 2) + full / small + 4
    assert rewritten < 4 * appended


def log_of(settings: Settings) -> Path:
    """The folder of the ledger's log."""
    return Path(settings.table_path(LEDGER), "_delta_log")


def age_log(settings: Settings) -> None:
    """Let all that is in the ledger's log be two hours older."""
    for file in log_of(settings).iterdir():
        then = file.stat().st_mtime - 2 * 3600
        os.utime(file, (then, then))


def files_on_disk(path: str) -> set[str]:
    """The data files below a table's folder."""
    return {str(file) for file in Path(path).rglob("*.parquet") if "_delta_log" not in file.parts}


@pytest.mark.requirement("CM-04")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_load_nothing_is_lost_or_doubled_and_no_stream_fails(
    spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    settings = backbone_settings.model_copy(update={"views": ViewSettings(interval_ms=100)})
    settling = settle_events.start(spark, settings)
    build_views.prepare(settings)
    builder = ViewBuilder(settings)
    building = ViewThread(settings, builder)
    building.start()
    sent = [append_all(settings, (registration(job, keyring) for job in JOBS))]
    tidied, done = threading.Event(), threading.Event()

    def send(seq: int, kind: str) -> None:
        sent.append(append_all(settings, (event(job, seq, kind) for job in JOBS)))

    def load() -> None:
        deadline, seq = time.monotonic() + DRAIN_LIMIT_S, 1
        try:
            send(seq, "started")
            while not tidied.wait(0.05) and time.monotonic() < deadline:
                send(seq := seq + 1, "progress")
            # The streams have something to do after it too.
            for _ in range(20):
                send(seq := seq + 1, "progress")
            send(seq + 1, "completed")
        finally:
            done.set()

    loading = threading.Thread(target=load)
    try:
        wait_until(lambda: ledger_of(settings).version() > 0, DRAIN_LIMIT_S, "a first commit")
        loading.start()
        rounds = 0
        while not done.is_set() or rounds < 2:
            tidy_views(builder, 1)
            tidy_ledger(settings)
            rounds += 1
            if OPTIMIZE in operations(settings):
                tidied.set()
        loading.join(DRAIN_LIMIT_S)
        count = len(list(read_to_end(settings.kafka)))
        assert count > sum(sent)
        wait_until(lambda: len(ledger_rows(settings)) >= count, DRAIN_LIMIT_S, "all are in the ledger")
        wait_until(
            lambda: sum(builder.progress.offsets.values()) == count, DRAIN_LIMIT_S, "all are in the views"
        )
        assert settling.isActive, settling.exception()
        assert building.failure is None
    finally:
        settling.stop()
        building.stop()
    rows = ledger_rows(settings)
    assert len(rows) == len({(row["partition"], row["offset"]) for row in rows}) == count
    done_to_it = operations(settings)
    first = done_to_it.index(OPTIMIZE)
    assert APPEND in done_to_it[:first] and APPEND in done_to_it[first:], "appends came before and after it"
    found = check_views(settings, ledger_of(settings), keyring)
    assert (found.differences, found.newer) == ([], 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_maintenance_both_jobs_go_on_where_they_were(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = backbone_settings
    append_all(settings, (registration(job, keyring) for job in JOBS))
    drain()
    for seq in range(1, 3):
        append_all(settings, (event(job, seq, "started" if seq == 1 else "progress") for job in JOBS))
        drain()
    before = ledger_rows(settings)
    build_views.prepare(settings)
    builder = ViewBuilder(settings)
    while builder.build():
        pass
    ends = LedgerSink(settings).ends
    pinned = ledger_of(settings)
    tidy_ledger(settings)
    assert pinned.to_pyarrow_table().num_rows == len(before), "a reader that holds a version can finish"
    # Files that a killed writer left behind, of two ages.
    strays = [Path(settings.table_path(LEDGER), f"part-{hours}.parquet") for hours in (1, 3)]
    for stray, hours in zip(strays, (1, 3), strict=True):
        stray.write_bytes(b"half a file")
        then = time.time() - hours * 3600
        os.utime(stray, (then, then))
    tidy_ledger(settings)
    assert [stray.exists() for stray in strays] == [True, False], "kept for 2 h"
    tidy_ledger(settings, 0)
    tidy_views(builder, 0)
    assert ledger_rows(settings) == before
    assert len(ledger_of(settings).file_uris()) == 1
    assert len(files_on_disk(settings.table_path(LEDGER))) == 1, "what was replaced is deleted"
    assert LedgerSink(settings).ends == ends, "the sink still finds the ledger's end"
    append_all(settings, (event(job, 3, "completed") for job in JOBS))
    rows = drain()
    assert len(rows) == len(before) + len(JOBS)
    read: list[int] = []
    real = build_views.read_changes

    def counted(ledger: DeltaTable, first: int, last: int) -> pa.Table:
        rows = real(ledger, first, last)
        read.append(rows.num_rows)
        return rows

    monkeypatch.setattr(build_views, "read_changes", counted)
    builder.close()
    build_views.catch_up(settings)
    assert sum(read) == len(JOBS), "what compaction rewrote was not read again as if it were new"
    found = check_views(settings, ledger_of(settings), keyring)
    assert (found.differences, found.newer) == ([], 0)


@pytest.mark.slow
def test_the_log_is_shortened_to_what_its_newest_checkpoint_needs(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    for job in JOBS[:3]:
        append_all(backbone_settings, [registration(job, keyring)])
        rows = drain()
    log = log_of(backbone_settings)
    tidy_ledger(backbone_settings)
    commits = len(list(log.glob("*.json")))
    assert commits > 3, "what is young is kept"
    age_log(backbone_settings)
    tidy_ledger(backbone_settings)
    assert len(list(log.glob("*.json"))) < commits
    assert ledger_rows(backbone_settings) == rows


def test_views_that_were_at_the_end_start_again_after_starts_without_an_event(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    """The views must read maintenance commits as they read rows, although the ledger's log is shortened."""
    for job in JOBS[:2]:
        append_all(backbone_settings, [registration(job, keyring)])
        drain()
    build_views.catch_up(backbone_settings)
    last_with_rows = ledger_of(backbone_settings).version()
    tidy_ledger(backbone_settings, 0)
    for _ in range(2):
        age_log(backbone_settings)
        build_views.catch_up(backbone_settings)
        tidy_ledger(backbone_settings)
    first = min(int(file.stem) for file in log_of(backbone_settings).glob("*.json"))
    assert first > last_with_rows + 1, "the log was shortened"
    build_views.catch_up(backbone_settings)
    found = check_views(backbone_settings, ledger_of(backbone_settings), keyring)
    assert (found.differences, found.newer) == ([], 0)


@pytest.mark.slow
def test_the_thread_tidies_at_each_interval_goes_on_after_a_failure_and_leaves_an_idle_ledger_alone(
    drain: Callable[[], Rows],
    backbone_settings: Settings,
    keyring: Keyring,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = backbone_settings.model_copy(update={"views": ViewSettings(maintenance_interval_s=0.05)})
    append_all(settings, [registration(JOBS[0], keyring)])
    drain()
    build_views.prepare(settings)
    builder = ViewBuilder(settings)
    real, failed = maintain_tables.tidy_ledger, threading.Event()

    def fail_once(settings: Settings) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("disk full")
        real(settings)

    monkeypatch.setattr(maintain_tables, "tidy_ledger", fail_once)
    maintenance = Maintenance(settings, builder, lambda: None)
    maintenance.start()
    try:
        wait_until(lambda: maintenance.rounds >= 2, DRAIN_LIMIT_S, "two rounds")
        version = ledger_of(settings).version()
        rounds = maintenance.rounds
        wait_until(lambda: maintenance.rounds >= rounds + 3, DRAIN_LIMIT_S, "three more rounds")
        assert ledger_of(settings).version() == version
    finally:
        maintenance.stop()
    assert "disk full" in capfd.readouterr().err
    assert read_progress(DeltaTable(settings.table_path(STREAM_ENTRIES))) == builder.progress
