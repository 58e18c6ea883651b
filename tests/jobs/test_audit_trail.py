"""The chain file and its anchors follow the ledger's commits: no gap and nothing double, whatever is killed."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from connectors.tools.audit.verification import verify
from jobs.driver.programs import WriterClaim
from jobs.ledger.audit_trail import AuditThread, AuditTrail
from jobs.ledger.ledger_table import FileRoots
from schemas.integrity import line_objects
from schemas.integrity.audit_anchors import (
    ANCHORS,
    anchor_key_file,
    anchor_public_key_file,
    anchors_file,
    is_beside_the_ledger,
    read_anchors,
)
from schemas.integrity.audit_chain import last_in_file, lines_in_file
from schemas.integrity.line_objects import ObjectLines
from schemas.settings.settings import Settings, StorageSettings
from schemas.tables.arrow_tables import ledger_batch
from tests.audited_ledger import AuditedLedger, ledger_row_at
from tests.broker_processes import wait_until
from tests.s3_server import ObjectStore
from trunkline_agent.errors import TrunklineError, UsageError

Rows = list[dict[str, Any]]


@pytest.fixture
def ledger(tmp_path: Path) -> AuditedLedger:
    """An empty one."""
    return AuditedLedger(tmp_path)


def entries_of(ledger: AuditedLedger) -> list[int]:
    return [line.entry.number for line in lines_in_file(ledger.trail.path) if line is not None]


def is_true(settings: Settings, **options: Any) -> bool:
    report = verify(settings, **options)
    assert report.findings == ()
    return report.is_true


def test_what_was_committed_and_not_written_down_before_a_crash_is_written_once_after_it(
    ledger: AuditedLedger,
) -> None:
    ledger.commit_offsets({0: (0, 3)})
    ledger.commit_offsets({0: (3, 5)})
    assert is_true(ledger.settings, without_anchors=True), "as long as the log has it, nothing is missing"
    ledger.trail.follow()
    ledger.commit_offsets({1: (0, 2)})
    for trail in (AuditTrail(ledger.settings), ledger.trail, AuditTrail(ledger.settings)):
        trail.follow()
        trail.catch_up()
    assert entries_of(ledger) == [0, 1, 2]
    # A line that was being written, and one of which nothing is left.
    whole = ledger.trail.path.read_bytes()
    for cut in (1, 40, len(whole.splitlines(keepends=True)[-1])):
        ledger.trail.path.write_bytes(whole[:-cut])
        AuditTrail(ledger.settings).follow()
        assert ledger.trail.path.read_bytes() == whole
    ledger.keep()
    assert is_true(ledger.settings)


def test_a_new_start_goes_on_after_the_newest_entry_wherever_it_stands(ledger: AuditedLedger) -> None:
    ledger.commit_offsets({0: (0, 3)})
    ledger.restart()
    ledger.commit_offsets({0: (3, 4)})
    ledger.trail.follow()
    ledger.forget_log()
    last = last_in_file(ledger.trail.path)
    assert last is not None and min(ledger.log_versions()) > last.version
    ledger.restart()
    ledger.commit_offsets({0: (4, 6)})
    ledger.commit([])
    ledger.keep()
    assert entries_of(ledger) == [0, 1, 2, 3], "an empty micro-batch has its entry, too"
    assert is_true(ledger.settings)


def test_the_log_is_not_cleaned_of_what_the_chain_file_has_not(ledger: AuditedLedger) -> None:
    first_commit = DeltaTable(ledger.path).version() + 1
    for first in range(3):
        ledger.commit_offsets({0: (first, first + 1)})
    in_the_way = ledger.trail.path.parent
    in_the_way.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(OSError):
            ledger.forget_log()
    assert first_commit in ledger.log_versions()
    in_the_way.unlink()
    ledger.forget_log()
    assert first_commit not in ledger.log_versions() and entries_of(ledger) == [0, 1, 2]


def test_anchors_are_made_at_the_interval_when_the_chain_has_grown_and_the_key_is_private(
    tmp_path: Path,
) -> None:
    ledger = AuditedLedger(tmp_path / "data", anchors_dir=tmp_path / "elsewhere", anchor_interval_s=3600)
    assert not ledger.trail.anchor(), "of nothing there is no anchor"
    ledger.commit_offsets({0: (0, 3)})
    ledger.trail.follow()
    assert ledger.trail.anchor() and not ledger.trail.anchor()
    ledger.commit_offsets({0: (3, 4)})
    ledger.trail.follow()
    assert not ledger.trail.anchor(), "not due"
    assert ledger.trail.anchor(at_once=True) and not ledger.trail.anchor(at_once=True)
    anchors = read_anchors(tmp_path / "elsewhere" / "anchors.ndjson")
    assert [a.statement.rows for a in anchors if a is not None] == [3, 4]
    key = anchor_key_file(ledger.settings)
    assert key.stat().st_mode & 0o777 == 0o600
    assert is_true(ledger.settings)
    key.chmod(0o644)
    ledger.commit_offsets({0: (4, 5)})
    ledger.trail.follow()
    with pytest.raises(UsageError, match="chmod 600"):
        ledger.trail.anchor(at_once=True)


def test_the_thread_follows_goes_on_after_a_failure_and_anchors_the_end(
    ledger: AuditedLedger, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jobs.ledger.audit_trail._AFTER_A_FAILURE_S", 0.05)
    monkeypatch.setattr("jobs.ledger.audit_trail._POLL_S", 0.05)
    in_the_way = anchors_file(ledger.settings).parent
    in_the_way.write_bytes(b"")
    ledger.commit_offsets({0: (0, 3)})
    thread = AuditThread(ledger.settings)
    thread.start()
    try:
        said: list[str] = []
        wait_until(
            lambda: said.append(capfd.readouterr().err) or "audit_trail: " in "".join(said), 10, "it is told"
        )
        in_the_way.unlink()
        wait_until(lambda: anchors_file(ledger.settings).exists(), 10, "the first anchor")
        ledger.commit_offsets({0: (3, 7)})
    finally:
        thread.stop()
    report = verify(ledger.settings)
    assert (report.findings, report.rows_not_anchored) == ((), 0), "the end is anchored, though it was not due"


def test_an_anchor_that_a_full_disk_has_cut_is_an_error_and_made_again(ledger: AuditedLedger) -> None:
    ledger.commit_offsets({0: (0, 3)})
    ledger.keep()
    path = anchors_file(ledger.settings)
    ledger.commit_offsets({0: (3, 4)})
    ledger.trail.follow()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, before[1]))
    try:
        with pytest.raises(OSError, match="only 40 of"):
            ledger.trail.anchor(at_once=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ledger.trail.anchor(at_once=True), "what could not be written is not taken for anchored"
    rows = [None if anchor is None else anchor.statement.rows for anchor in read_anchors(path)]
    assert rows == [3, None, 4] and is_true(ledger.settings)


def test_an_anchor_writes_its_public_key_once(ledger: AuditedLedger) -> None:
    ledger.commit_offsets({0: (0, 3)})
    ledger.keep()
    folder = anchor_key_file(ledger.settings).parent
    changed = folder.stat().st_mtime_ns
    ledger.commit_offsets({0: (3, 4)})
    ledger.keep()
    assert folder.stat().st_mtime_ns == changed, "nothing was made or removed beside it"


def test_rows_out_of_order_have_no_root(ledger: AuditedLedger) -> None:
    def batch(*offsets: int) -> pa.RecordBatch:
        return ledger_batch([ledger_row_at(0, at) for at in offsets])

    roots = FileRoots()
    roots.add(batch(3, 4))
    with pytest.raises(ValueError, match="order"):
        roots.add(batch(4))
    with pytest.raises(ValueError, match="order"):
        FileRoots().add(batch(2, 1))


def in_objects(folder: Path, s3: ObjectStore) -> AuditedLedger:
    """A ledger with all that belongs to it in an object store."""
    there = f"s3://{s3.bucket}"
    settings = Settings(data_dir=folder, storage=StorageSettings(tables=f"{there}/tables"))
    return AuditedLedger(settings, chain_dir=f"{there}/chain", anchors_dir=f"{there}/anchors")


@pytest.mark.requirement("DP-18")
def test_chain_and_anchors_in_an_object_store_are_kept_by_any_machine_and_verified(
    tmp_path: Path, s3: ObjectStore
) -> None:
    ledger = in_objects(tmp_path / "one", s3)
    for first in range(3):
        ledger.commit_offsets({0: (first, first + 1)})
        ledger.keep()
    # The next job runs on another machine.
    other = in_objects(tmp_path / "other", s3)
    other.commit_offsets({0: (3, 5)})
    other.keep()
    key = anchor_public_key_file(ledger.settings)
    keys = [key, anchor_public_key_file(other.settings)]
    assert entries_of(ledger) == [0, 1, 2, 3]
    assert is_true(other.settings, public_keys=keys)
    assert verify(other.settings, f"s3://{s3.bucket}/anchors/{ANCHORS}", keys).anchors == 4
    # Somebody with rights to empty a bucket can empty all of it.
    assert is_beside_the_ledger(other.settings, anchors_file(other.settings))
    assert not is_beside_the_ledger(other.settings, ObjectLines(f"s3://{s3.bucket}-anchors/anchors"))


@pytest.mark.requirement("DP-18")
def test_lines_in_objects_stay_whole_when_they_are_written_twice_and_merged(s3: ObjectStore) -> None:
    lines = ObjectLines(f"s3://{s3.bucket}/lines")
    s3.fail(unchecked=1)
    assert not lines.exists() and not list(lines.lines())
    written = [f"line {number}\n".encode() for number in range(120)]
    for number, line in enumerate(written[:110]):
        lines.append(number, number, line)
    lines.append(50, 119, b"".join(written[50:]))
    lines.append(105, 107, b"".join(written[105:108]))
    assert list(lines.lines()) == written
    assert next(lines.from_end()) == written[-1]
    reading, before = lines.lines(), lines.from_end()
    begin, end = next(reading), next(before)
    lines.merge()
    assert [begin, *reading] == written, "a merge takes nothing from who reads"
    assert {end, *before} == set(written)
    assert list(lines.lines()) == written
    lines.append(120, 120, b"one more\n")
    lines.merge()
    assert list(lines.lines()) == [*written, b"one more\n"]
    assert next(lines.from_end()) == b"one more\n"
    s3.fail(refused=1)
    with pytest.raises(TrunklineError, match=f"s3://{s3.bucket}/lines"):
        lines.append(121, 121, b"lost\n")


@pytest.mark.requirement("DP-18")
def test_a_merge_takes_a_bounded_number_of_objects_and_the_next_one_goes_on(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_objects, "_MERGED_FROM", 3)
    monkeypatch.setattr(line_objects, "_MERGED_MOST", 4)
    lines = ObjectLines(f"s3://{s3.bucket}/lines")
    written = [f"line {number}\n".encode() for number in range(9)]
    for number, line in enumerate(written):
        lines.append(number, number, line)
    for left in (1 + 5, 2 + 1, 2 + 1):
        lines.merge()
        assert len(lines._names()) == left
        assert list(lines.lines()) == written
        assert list(lines.from_end()) == written[::-1]


@pytest.mark.requirement("DP-13")
def test_a_claim_removes_no_commit_whose_entry_may_be_nowhere_else(tmp_path: Path) -> None:
    ledger = AuditedLedger(tmp_path)
    ledger.commit_offsets({0: (0, 3)})
    versions = ledger.log_versions()
    DeltaTable(ledger.path).create_checkpoint()
    then = time.time() - 3 * 3600
    for file in Path(ledger.path, "_delta_log").iterdir():
        os.utime(file, (then, then))
    for _ in range(2):
        with WriterClaim(ledger.settings):
            pass
    assert set(versions) <= set(ledger.log_versions())
