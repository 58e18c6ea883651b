"""The stranger of `./trunkline prove`, who writes records of every type past all doors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from schemas.fold.entries import Entries
from schemas.keys.record_macs import SIGNED_BY_AUTHOR
from schemas.streams.fold import RECORD_TYPES, settle
from schemas.wire.record import OutgoingRecord
from tests.faults.prove.comparison import DIVERGENT, LOST, Evidence, Line, compare
from tests.faults.prove.foreign_writer import foreign_records, targets_of
from tests.faults.prove.oracle import FOREIGN, Note, Oracle
from tests.schemas.job_records import KEYRING
from tests.schemas.stream_records import as_read, known_stream
from trunkline_agent.wire.verdicts import UNAUTHENTICATED_RECORD

pytestmark = pytest.mark.requirement("ST-61")
OF_THE_FORM = {"too_large", "malformed", "schema_version"}


def test_the_stranger_writes_each_type_that_carries_no_signature_of_its_sender() -> None:
    found = foreign_records({}, "one")
    assert {one.type for one in found} == set(RECORD_TYPES) - SIGNED_BY_AUTHOR
    assert len({one.ce_id for one in found}) == len(found)
    others = {one.ce_id for one in foreign_records({}, "two")}
    assert not others & {one.ce_id for one in found}


@pytest.mark.parametrize("record", foreign_records({}, "one"), ids=lambda one: one.type)
def test_each_record_is_well_formed_so_only_its_missing_mac_can_reject_it(record: OutgoingRecord) -> None:
    before = settle(as_read(record), known_stream(record.key), KEYRING, Entries())
    assert before.reason not in OF_THE_FORM, before
    settled = settle(as_read(record), known_stream(record.key), KEYRING, known_stream(b"control/macs-1"))
    assert (settled.verdict, settled.reason) == ("rejected", UNAUTHENTICATED_RECORD)
    assert not settled.changes


def test_the_records_are_about_streams_of_the_load(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "oracle.jsonl")
    oracle.acked("http", "job/0a1b2c3d", "registered", "boss", "x")
    oracle.acked("http", "mailbox/default/hanna", "m1", "hugo", "x")
    found = {one.type: one for one in foreign_records(targets_of(oracle), "one")}
    cancelled, claimed = found["job.cancelled"], found["message.claimed"]
    assert (cancelled.stream, json.loads(cancelled.value)["job_id"]) == ("job/0a1b2c3d", "0a1b2c3d")
    assert (claimed.stream, json.loads(claimed.value)["to"]) == ("mailbox/default/hanna", "hanna")
    assert json.loads(claimed.value)["realm"] == "default"
    assert found["task.started"].stream == "task/t1", "the load has none"


def test_a_foreign_record_must_be_rejected_for_its_missing_mac(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "oracle.jsonl")
    oracle.note(Note(FOREIGN, "kafka", "job/7f", "foreign-one", "stranger"))
    good = Line(
        0, 1, "job/7f", "job.cancelled", "rejected", "", ce_id="foreign-one", reason=UNAUTHENTICATED_RECORD
    )

    def kinds(*lines: Line, is_at_rest: bool = True) -> set[str]:
        found = compare(oracle.notes(), Evidence(list(lines)), is_at_rest=is_at_rest)
        return {finding.kind for finding in found}

    assert kinds(good) == set()
    assert kinds(dataclasses.replace(good, verdict="accepted", reason="")) == {DIVERGENT}
    assert kinds(dataclasses.replace(good, reason="after_terminal")) == {DIVERGENT}
    assert kinds(dataclasses.replace(good, ce_id="another")) == {LOST}
    assert kinds(is_at_rest=False) == set(), "it may still come"
