"""An auditor finds each way to change the ledger, and where; what maintenance does is none of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from deltalake import DeltaTable, write_deltalake
from msgspec.structs import replace

from connectors.cli.main import main
from connectors.tools.audit.verification import Report, verify
from jobs.maintain_tables import tidy_ledger
from schemas.integrity.audit_anchors import (
    anchor_key_file,
    anchor_public_key_file,
    anchors_file,
    read_anchors,
    sign_statement,
    statement_of,
)
from schemas.integrity.audit_chain import commit_root, last_in_file, lines_in_file, partition_root
from schemas.integrity.ledger_leaves import ENCODINGS, NEWEST_ENCODING, ledger_leaves
from schemas.settings.settings import settings_environment
from schemas.tables.arrow_tables import LEDGER_ARROW, ledger_batch
from tests.audited_ledger import AuditedLedger, ledger_row_at, three_commits
from trunkline_agent.errors import NotFound, UsageError
from trunkline_agent.mcp.signing import public_key_pem

pytestmark = pytest.mark.long


@pytest.fixture
def ledger(tmp_path: Path) -> AuditedLedger:
    """Offsets 0 to 11, 0 to 2 and 0 to 1 of three partitions, by three commits, anchored."""
    return three_commits(tmp_path)


def checked(ledger: AuditedLedger, **options: Any) -> Report:
    return verify(ledger.settings, **options)


def places(report: Report) -> list[tuple[str, int | None, int | None, int | None, int | None]]:
    """Return the findings and their places: kind, partition, first and last offset, entry."""
    return [(f.what.value, f.partition, f.first, f.last, f.entry) for f in report.findings]


def said(report: Report) -> str:
    return "\n".join(finding.text for finding in report.findings)


def append_row(ledger: AuditedLedger, **changed: Any) -> None:
    rows = ledger_batch([ledger_row_at(changed.pop("partition"), changed.pop("offset"), **changed)])
    write_deltalake(ledger.path, pa.Table.from_batches([rows]), mode="append")


def cut_last_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def change_line(path: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit one JSON line of a file."""
    lines = path.read_text().splitlines()
    document = json.loads(lines[number])
    change(document)
    lines[number] = json.dumps(document, sort_keys=True, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")


def cut_off(ledger: AuditedLedger) -> None:
    """Take the last commit out of table and chain by hand, as if it had never been."""
    last = last_in_file(ledger.trail.path)
    assert last is not None
    for file in Path(ledger.path, "_delta_log").iterdir():
        if file.name[:20].isdecimal() and int(file.name[:20]) >= last.version:
            file.unlink()
    cut_last_line(ledger.trail.path)


def test_an_untouched_ledger_is_true_whatever_the_size_of_the_windows(ledger: AuditedLedger) -> None:
    report = checked(ledger)
    assert report.findings == ()
    assert (report.rows, report.entries, report.anchors, report.rows_not_anchored) == (17, 3, 1, 0)
    for window_rows in (1, 5, 8):
        report = checked(ledger, window_rows=window_rows)
        assert (report.findings, report.rows) == ((), 17)


def test_a_changed_cell_is_found_at_its_offset_also_after_the_old_files_are_gone(ledger: AuditedLedger) -> None:
    table = DeltaTable(ledger.path)
    table.update(updates={"verdict": "'rejected'"}, predicate="partition = 0 AND offset = 6")
    tidy_ledger(ledger.settings, 0)
    report = checked(ledger)
    assert places(report) == [("row_changed", 0, 6, 6, 1)]
    second = list(lines_in_file(ledger.trail.path))[1]
    assert second is not None
    assert f"changed: partition 0, offset 6 (entry 1, commit {second.version})" in said(report)
    assert places(checked(ledger, window_rows=5)) == places(report)


def test_no_column_can_be_changed_unseen(tmp_path: Path) -> None:
    columns = [name for name in LEDGER_ARROW.names if name not in ("partition", "offset")]
    ledger = AuditedLedger(tmp_path)
    ledger.commit_offsets({0: (0, len(columns))})
    ledger.keep()
    rows = sorted(DeltaTable(ledger.path).to_pyarrow_table().to_pylist(), key=lambda row: row["offset"])
    for column, row in zip(columns, rows, strict=True):
        kind = LEDGER_ARROW.field(column).type
        others: dict[Any, Any] = {pa.string(): "other", pa.binary(): b"other", pa.bool_(): True}
        others |= {pa.timestamp("us", "UTC"): datetime(2020, 1, 1, tzinfo=UTC)}
        # Of a map the smallest change there is: none to empty, empty to none, or another value.
        row[column] = (None if row[column] == [] else []) if pa.types.is_map(kind) else others.get(kind, 77)
    write_deltalake(ledger.path, pa.Table.from_pylist(rows, LEDGER_ARROW), mode="overwrite")
    assert places(checked(ledger)) == [("row_changed", 0, at, at, 0) for at in range(len(columns))]


def test_swapped_rows_are_found_at_both_offsets(ledger: AuditedLedger) -> None:
    rows = DeltaTable(ledger.path).to_pyarrow_table().to_pylist()
    one, other = (next(r for r in rows if (r["partition"], r["offset"]) == (0, at)) for at in (5, 8))
    one["offset"], other["offset"] = 8, 5
    write_deltalake(ledger.path, pa.Table.from_pylist(rows, LEDGER_ARROW), mode="overwrite")
    assert places(checked(ledger)) == [("row_changed", 0, 5, 5, 1), ("row_changed", 0, 8, 8, 1)]


def test_a_removed_row_is_named(ledger: AuditedLedger) -> None:
    DeltaTable(ledger.path).delete("partition = 0 AND offset IN (1, 9, 10)")
    assert places(checked(ledger)) == [("row_missing", 0, 1, 1, 0), ("row_missing", 0, 9, 10, 2)]


def test_added_rows_are_named_where_nobody_has_put_any_and_where_there_is_one(ledger: AuditedLedger) -> None:
    append_row(ledger, partition=0, offset=12)
    append_row(ledger, partition=9, offset=3)
    append_row(ledger, partition=2, offset=1)
    found = [
        ("row_added", 0, 12, 12, None),
        ("row_added", 9, 3, 3, None),
        ("row_twice", 2, 1, 1, 2),
    ]
    assert places(checked(ledger)) == found
    assert sorted(map(str, places(checked(ledger, window_rows=3)))) == sorted(map(str, found))


def test_a_file_that_is_gone_or_damaged_is_named_with_the_rows_that_it_had(ledger: AuditedLedger) -> None:
    gone, damaged = (Path(uri) for uri in sorted(DeltaTable(ledger.path).file_uris())[:2])
    gone.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-20])
    report = checked(ledger)
    assert [what for what, *_ in places(report)][:2] == ["file_unreadable"] * 2
    assert gone.name in said(report) and damaged.name in said(report)
    assert {what for what, *_ in places(report)[2:]} == {"row_missing"}


def test_the_end_cut_off_with_its_chain_is_seen_by_the_anchor_alone(ledger: AuditedLedger) -> None:
    cut_off(ledger)
    report = checked(ledger)
    assert places(report) == [
        ("end_cut_off", None, None, None, 2),
        ("end_cut_off", 0, 9, 11, None),
        ("end_cut_off", 2, 0, 1, None),
    ]
    assert "2 entries, and had 3 with 17 rows" in said(report)
    assert checked(ledger, without_anchors=True).is_true, "rows and chain agree: only the anchor knows"


def test_what_was_cut_off_is_still_missed_after_other_rows_took_its_place(ledger: AuditedLedger) -> None:
    cut_off(ledger)
    ledger.restart()
    ledger.commit_offsets({0: (9, 10)})
    ledger.keep()
    report = checked(ledger)
    assert [what for what, *_ in places(report)] == ["chain_broken"]
    assert "not the one that was anchored" in said(report)


def test_an_edited_entry_is_found_also_with_its_value_and_root_made_anew(ledger: AuditedLedger) -> None:
    def forge(document: dict[str, Any]) -> None:
        document["entry"]["rows"] += 1

    path, honest = ledger.trail.path, ledger.trail.path.read_bytes()
    change_line(path, 1, forge)
    assert {f.entry for f in checked(ledger).findings if f.what == "entry_changed"} == {1}
    path.write_bytes(honest)
    log = Path(ledger.path, "_delta_log")
    # With rows that fit: only the links and the anchors are left to say so.
    DeltaTable(ledger.path).update(updates={"verdict": "'rejected'"}, predicate="partition = 0 AND offset = 6")
    tidy_ledger(ledger.settings, 0)
    for file in log.glob("*.json"):
        file.unlink()
    line = list(lines_in_file(path))[1]
    assert line is not None
    rows = ledger_batch(
        [ledger_row_at(0, at, verdict="rejected" if at == 6 else "accepted") for at in range(4, 9)]
    )
    root = partition_root(0, (4, 8), ledger_leaves(rows, ENCODINGS[NEWEST_ENCODING]))
    entry = replace(line.entry, partitions=(root,), root=commit_root([root]))
    forged = replace(line, entry=entry, value=entry.value())
    lines = honest.splitlines(keepends=True)
    path.write_bytes(lines[0] + forged.text() + lines[2])
    assert places(checked(ledger)) == [("chain_broken", None, None, None, 2)]
    path.write_bytes(lines[0] + lines[2])
    assert ("entries_missing", None, None, None, 2) in places(checked(ledger))


def test_a_last_entry_forged_before_it_was_anchored_is_not_the_one_in_the_log(ledger: AuditedLedger) -> None:
    ledger.commit_offsets({0: (12, 14)})
    ledger.trail.follow()
    path = ledger.trail.path
    last = last_in_file(path)
    assert last is not None and checked(ledger).is_true
    entry = replace(last.entry, batch=7)
    cut_last_line(path)
    path.write_bytes(path.read_bytes() + replace(last, entry=entry, value=entry.value()).text())
    assert places(checked(ledger)) == [("entry_changed", None, None, None, 3)]
    cut_last_line(path)
    path.write_bytes(path.read_bytes() + b'{"no entry": 1}\n')
    assert places(checked(ledger)) == [("chain_broken", None, None, None, None)]


def test_a_chain_written_anew_with_its_rows_does_not_fit_the_anchor(
    ledger: AuditedLedger, tmp_path: Path
) -> None:
    other = AuditedLedger(tmp_path / "other")
    other.commit_offsets({0: (0, 12), 1: (0, 3), 2: (0, 2)})
    other.trail.follow()
    report = verify(other.settings, anchors_file(ledger.settings), [anchor_public_key_file(ledger.settings)])
    assert [what for what, *_ in places(report)] == ["made_anew"]
    assert "17 rows" in said(report)


def test_a_forged_anchor_and_one_with_another_statement_are_refused(ledger: AuditedLedger) -> None:
    last = last_in_file(ledger.trail.path)
    assert last is not None
    path = anchors_file(ledger.settings)
    honest = path.read_bytes()
    statement = statement_of(last.entry, 1)
    path.write_bytes(honest + sign_statement(statement, Ed25519PrivateKey.generate()).text())
    assert [(f.what, "line 2" in f.text) for f in checked(ledger).findings] == [("anchor_forged", True)]

    def later(document: dict[str, Any]) -> None:
        document["statement"]["time_us"] += 1

    path.write_bytes(honest)
    change_line(path, 0, later)
    assert "anchor_forged" in [what for what, *_ in places(checked(ledger))]
    path.write_bytes(honest + b'{"half of an anch')
    report = checked(ledger)
    assert report.is_true and report.anchors_unreadable == 1, "a crash leaves half a line, and it says nothing"


def test_without_anchors_the_answer_is_no_and_without_the_public_key_there_is_none(
    ledger: AuditedLedger, tmp_path: Path
) -> None:
    report = checked(ledger, anchors_at=tmp_path / "nowhere")
    assert [what for what, *_ in places(report)] == ["anchors_missing"] and "nowhere" in said(report)
    assert checked(ledger, without_anchors=True).is_true
    with pytest.raises(UsageError, match="--public-key"):
        checked(ledger, public_keys=[tmp_path / "none.pub"])
    anchor_public_key_file(ledger.settings).unlink()
    with pytest.raises(UsageError, match="--public-key"):
        checked(ledger)


def test_keys_that_signed_one_after_the_other_count_both(ledger: AuditedLedger) -> None:
    anchor_key_file(ledger.settings).unlink()
    ledger.commit_offsets({1: (3, 5)})
    ledger.keep()
    report = checked(ledger)
    assert (report.findings, report.anchors, report.rows_not_anchored) == ((), 2, 0)
    keys = [anchor.key for anchor in read_anchors(anchors_file(ledger.settings)) if anchor is not None]
    assert len(set(keys)) == 2


def test_compaction_vacuum_and_a_shorter_log_leave_it_true(ledger: AuditedLedger) -> None:
    for round_number in range(2):
        tidy_ledger(ledger.settings, 0)
        report = checked(ledger)
        assert (report.findings, report.rows) == ((), 17 + 2 * round_number)
        ledger.forget_log()
        ledger.restart()
        ledger.commit_offsets({1: (3 + round_number, 4 + round_number)})
        tidy_ledger(ledger.settings, 0)
        ledger.commit_offsets({2: (2 + round_number, 3 + round_number)})
    assert min(ledger.log_versions()) > 3, "the log has forgotten the first commits"
    assert len(DeltaTable(ledger.path).file_uris()) < 5
    report = checked(ledger)
    assert (report.findings, report.rows, report.entries, report.rows_not_anchored) == ((), 21, 7, 4)


def test_rows_that_are_older_than_the_chain_are_counted_and_later_ones_are_not_taken_for_them(
    tmp_path: Path,
) -> None:
    ledger = AuditedLedger(tmp_path)
    write_deltalake(
        ledger.path,
        pa.Table.from_batches([ledger_batch([ledger_row_at(0, at) for at in range(5)])]),
        mode="append",
    )
    with pytest.raises(NotFound):
        checked(ledger)
    ledger.restart()
    ledger.commit_offsets({0: (5, 7), 1: (0, 2)})
    ledger.keep()
    report = checked(ledger)
    assert (report.findings, report.rows, report.rows_before_the_chain) == ((), 9, 5)
    append_row(ledger, partition=2, offset=0)
    assert places(checked(ledger)) == [("row_added", 2, 0, 0, None)]


def test_a_ledger_that_hides_rows_by_a_feature_we_never_use_is_refused(ledger: AuditedLedger) -> None:
    log = Path(ledger.path, "_delta_log")
    newest = max(log.glob("*.json"))
    metadata = next(
        json.loads(line)
        for file in sorted(log.glob("*.json"))
        for line in file.read_text().splitlines()
        if "metaData" in line
    )
    metadata["metaData"]["configuration"]["delta.columnMapping.mode"] = "name"
    Path(log, f"{int(newest.stem) + 1:020d}.json").write_text(json.dumps(metadata) + "\n")
    assert [what for what, *_ in places(checked(ledger))] == ["hidden_rows"]


def test_the_command_says_no_with_1_what_is_wrong_and_where(
    ledger: AuditedLedger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in settings_environment(ledger.settings).items():
        monkeypatch.setenv(name, value)
    assert main(["audit", "verify"]) == 0
    assert "All rows are as they were settled." in capsys.readouterr().out
    assert main(["audit", "public-key"]) == 0
    key = tmp_path / "mine.pub"
    key.write_text(capsys.readouterr().out)
    assert main(["audit", "anchors", "--json"]) == 0
    (anchor,) = json.loads(capsys.readouterr().out)["anchors"]
    assert (anchor["entries"], anchor["rows"]) == (3, 17)
    DeltaTable(ledger.path).delete("partition = 1 AND offset = 1")
    where = ["--anchors", str(anchors_file(ledger.settings).parent), "--public-key", str(key)]
    assert main(["audit", "verify", *where, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["true"] and found["findings"][0]["what"] == "row_missing"
    assert main(["audit", "verify", *where]) == 1
    assert "WRONG  missing: partition 1, offset 1" in capsys.readouterr().out
    monkeypatch.setenv("TRUNKLINE__DATA_DIR", str(tmp_path / "nothing"))
    assert main(["audit", "verify"]) == 3
    assert public_key_pem(Ed25519PrivateKey.generate().public_key()) != key.read_text()
