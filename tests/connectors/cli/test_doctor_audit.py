"""The doctor's findings about the anchors of the audit chain."""

from __future__ import annotations

import pytest

from connectors.cli.doctor.findings import FAIL, OK, WARN
from connectors.cli.doctor.tables import check_anchors, check_anchors_place
from schemas.integrity.audit_anchors import anchors_file, is_beside_the_ledger
from tests.audited_ledger import AuditedLedger, three_commits


def test_an_anchored_chain_is_well(tmp_path):
    finding = check_anchors(three_commits(tmp_path).settings)
    assert finding.level == OK and "signs 3 commits" in finding.found


def test_anchors_beside_the_ledger_are_told_and_those_in_another_place_are_well(tmp_path):
    data = tmp_path / "data"
    for beside in ({}, {"anchors_dir": data / "elsewhere"}, {"anchors_dir": tmp_path / "x" / ".." / "data"}):
        finding = check_anchors_place(AuditedLedger(data, **beside).settings)
        assert finding.level == WARN and "audit.anchors_dir" in finding.mend
    finding = check_anchors_place(AuditedLedger(data, anchors_dir=tmp_path / "other").settings)
    assert finding.level == OK and str(tmp_path / "other") in finding.found
    (tmp_path / "link").symlink_to(data)
    linked = AuditedLedger(data, anchors_dir=tmp_path / "link").settings
    assert check_anchors_place(linked).level == WARN
    tables = linked.model_copy(
        update={"storage": linked.storage.model_copy(update={"tables": str(tmp_path / "tables")})}
    )
    assert not is_beside_the_ledger(tables, tmp_path / "other")
    assert is_beside_the_ledger(tables, tmp_path / "tables" / "ledger" / "anchors")


def test_before_the_first_rows_there_is_no_anchor(tmp_path):
    finding = check_anchors(AuditedLedger(tmp_path).settings)
    assert finding.level == WARN and "not there yet" in finding.found


@pytest.mark.parametrize(("interval_s", "level"), [(60.0, OK), (0.001, WARN)])
def test_a_chain_that_goes_on_without_anchors_is_told_when_one_is_overdue(tmp_path, interval_s, level):
    ledger = AuditedLedger(tmp_path, anchor_interval_s=interval_s)
    ledger.commit_offsets({0: (0, 2)})
    ledger.keep()
    ledger.commit_offsets({0: (2, 4)})
    ledger.trail.follow()  # a commit takes longer than three thousandths of a second
    finding = check_anchors(ledger.settings)
    assert (finding.level, "1 have come since" in finding.found) == (level, level == WARN)


def test_a_chain_that_is_shorter_than_what_was_signed_fails(tmp_path):
    ledger = three_commits(tmp_path)
    lines = ledger.trail.path.read_bytes().splitlines(keepends=True)
    ledger.trail.path.write_bytes(b"".join(lines[:-1]))
    finding = check_anchors(ledger.settings)
    assert finding.level == FAIL and "audit verify" in finding.mend


def test_a_file_without_an_anchor_fails(tmp_path):
    ledger = three_commits(tmp_path)
    anchors_file(ledger.settings).write_bytes(b"{\n")
    assert check_anchors(ledger.settings).level == FAIL
