"""The oracle and the comparison of `./trunkline prove`: each kind of finding is seen when it is planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.faults.prove.comparison import (
    CHANGED,
    DIVERGENT,
    DUPLICATE,
    LOST,
    OUT_OF_ORDER,
    Evidence,
    Line,
    Mail,
    Reader,
    Shown,
    compare,
)
from tests.faults.prove.evidence import lines_of
from tests.faults.prove.oracle import ASKED, ENDED, FORGED, HANDED, Note, Oracle, content_hash, read_notes
from tests.faults.prove.quiet import owed

BOX, JOB, TASK = "mailbox/default/ann", "job/0a1b2c3d", "task/7f"


def mail(number: int, status: str = "unread", said: str | None = None) -> Mail:
    """A message in the mailbox."""
    return Mail(BOX, f"m{number}", status, content_hash("bob", "ann", said or f"{number}"))


def posted(number: int, offset: int, verdict: str = "accepted", said: str | None = None) -> Line:
    """A message in the ledger."""
    found = content_hash("bob", "ann", said or f"{number}")
    return Line(0, offset, BOX, "message.posted", verdict, f"m{number}", found)


def event(seq: int, offset: int, status: str, verdict: str = "accepted") -> Line:
    """A job's event in the ledger."""
    found = content_hash("progress", f"step {seq}")
    return Line(1, offset, JOB, "job.event", verdict, str(seq), found, status)


def shown(name: str, *messages: Mail, job: str = "completed") -> Shown:
    """A reader that shows these messages, and the job in this state."""
    return Shown(name, {JOB: job}, {(one.stream, one.id): one for one in messages})


def good() -> Evidence:
    """Return the evidence of a run without errors."""
    messages = (mail(1), mail(2), mail(3, "claimed"))
    ledger = [posted(1, 10), posted(2, 11), posted(2, 12, "duplicate"), posted(3, 13)]
    ledger += [event(1, 5, "running"), event(2, 6, "completed"), event(3, 7, "completed", "rejected")]
    return Evidence(ledger, shown("views", *messages), [shown("live view", *messages)])


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    """One that has noted three messages, a job's two events and its end, and a message that was handed out."""
    oracle = Oracle(tmp_path / "oracle.jsonl")
    for number in (1, 2, 3):
        oracle.acked("http", BOX, f"m{number}", "bob", content_hash("bob", "ann", f"{number}"))
    for seq in (1, 2):
        oracle.acked("mqtt", JOB, str(seq), "0a1b2c3d", content_hash("progress", f"step {seq}"))
    oracle.note(Note(HANDED, "http", BOX, "m3", request="r1"))
    oracle.note(Note(HANDED, "http", BOX, "m3", request="r1"))
    oracle.note(Note(ENDED, "mqtt", JOB, "end", status="completed"))
    return oracle


def change(evidence: Evidence, *, ledger: Callable[[Line], Line | None] = lambda line: line) -> Evidence:
    """The evidence with other lines of the ledger."""
    evidence.ledger = [found for line in evidence.ledger if (found := ledger(line)) is not None]
    return evidence


def kinds(oracle: Oracle, evidence: Evidence) -> set[str]:
    """The kinds of the findings."""
    return {finding.kind for finding in compare(oracle.notes(), evidence)}


def test_where_nothing_went_wrong_nothing_is_found(oracle: Oracle) -> None:
    assert compare(oracle.notes(), good()) == []
    assert oracle.acknowledged == 5


def test_what_is_in_no_accepted_row_is_lost(oracle: Oracle) -> None:
    def without(line: Line) -> Line | None:
        return None if line.id == "m1" else line

    (found,) = compare(oracle.notes(), change(good(), ledger=without))
    assert found.kind == LOST and "m1" in found.what


def test_what_is_in_the_ledger_and_not_in_the_view_is_lost(oracle: Oracle) -> None:
    evidence = good()
    for reader in (evidence.views, *evidence.others):
        del reader.mail[BOX, "m2"]
    assert kinds(oracle, evidence) == {LOST}


def test_a_missing_answer_is_lost_and_a_second_one_is_a_duplicate(oracle: Oracle) -> None:
    oracle.note(Note(ASKED, "xml", "mailbox/default/w", "x", recipient=BOX, kind="worked", body="<n>1</n>"))
    assert kinds(oracle, good()) == {LOST}
    evidence = good()
    for number in (8, 9):
        answer = Mail(BOX, f"m{number}", "unread", f"hash {number}", "worked", "<worked><n>1</n></worked>")
        for reader in (evidence.views, *evidence.others):
            reader.mail[BOX, answer.id] = answer
    assert kinds(oracle, evidence) == {DUPLICATE}
    for reader in (evidence.views, *evidence.others):
        del reader.mail[BOX, "m9"]
    assert compare(oracle.notes(), evidence) == []


def test_one_content_under_two_ids_in_a_mailbox_is_a_duplicate(oracle: Oracle) -> None:
    evidence = good()
    for reader in (evidence.views, *evidence.others):
        reader.mail[BOX, "m4"] = mail(4, said="1")
    assert kinds(oracle, evidence) == {DUPLICATE}


def test_a_record_with_two_rows_is_a_duplicate(oracle: Oracle) -> None:
    evidence = good()
    evidence.ledger.append(evidence.ledger[2])
    assert kinds(oracle, evidence) == {DUPLICATE}


def test_what_is_handed_out_to_two_requests_is_a_duplicate(oracle: Oracle) -> None:
    oracle.note(Note(HANDED, "http", BOX, "m3", request="r2"))
    assert kinds(oracle, good()) == {DUPLICATE}


def test_other_content_in_ledger_or_view_is_divergent(oracle: Oracle) -> None:
    evidence = good()
    evidence.ledger[0] = posted(1, 10, said="other")
    assert kinds(oracle, evidence) == {DIVERGENT}
    evidence = good()
    for reader in (evidence.views, *evidence.others):
        reader.mail[BOX, "m1"] = mail(1, said="other")
    assert kinds(oracle, evidence) == {DIVERGENT}


def test_a_live_view_that_shows_something_else_is_divergent(oracle: Oracle) -> None:
    evidence = good()
    evidence.others[0].mail[BOX, "m1"] = mail(1, "claimed")
    assert kinds(oracle, evidence) == {DIVERGENT}
    evidence = good()
    evidence.others[0].mail[BOX, "m7"] = mail(7)
    assert kinds(oracle, evidence) == {DIVERGENT}


def test_a_difference_to_the_refold_and_an_accepted_forgery_are_divergent(oracle: Oracle) -> None:
    evidence = good()
    evidence.differences.append("registry_jobs 0a1b2c3d: 1 | 2")
    assert kinds(oracle, evidence) == {DIVERGENT}
    oracle.note(Note(FORGED, "mqtt", JOB, "2", hash=content_hash("progress", "step 2")))
    assert kinds(oracle, good()) == {DIVERGENT}


def test_two_of_one_sender_in_the_wrong_order_are_out_of_order(oracle: Oracle) -> None:
    evidence = good()
    evidence.ledger[0], evidence.ledger[1] = posted(1, 11), posted(2, 10)
    assert kinds(oracle, evidence) == {OUT_OF_ORDER}


@pytest.mark.parametrize("said", [("bob 1", "ada 2", "bob 2", "ada 1"), ("bob 1", "bob 2", "bob 1")])
def test_a_record_that_its_sender_or_another_one_repeats_lies_where_it_was_said_first(
    said: tuple[str, ...], tmp_path: Path
) -> None:
    oracle = Oracle(tmp_path / "oracle.jsonl")
    for sender, number in (one.split() for one in said):
        oracle.acked("http", BOX, f"m{number}", sender, content_hash("bob", "ann", number))
    assert compare(oracle.notes(), good()) == []


def test_who_mixes_its_events_up_itself_is_not_held_to_their_order(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "oracle.jsonl")
    for number in (2, 1):
        oracle.acked("mqtt", BOX, f"m{number}", "bob", "", ordered=False)
    assert compare(oracle.notes(), good()) == []


def test_a_job_that_had_ended_and_a_message_that_was_handed_out_stay_so(oracle: Oracle) -> None:
    evidence = good()
    for reader in (evidence.views, *evidence.others):
        reader.states[JOB] = "running"
    assert kinds(oracle, evidence) == {CHANGED}
    evidence = good()
    for reader in (evidence.views, *evidence.others):
        reader.mail[BOX, "m3"] = mail(3, "unread")
    assert kinds(oracle, evidence) == {CHANGED}


def test_notes_are_in_the_file_when_they_are_made_and_come_back_equal(oracle: Oracle, tmp_path: Path) -> None:
    assert read_notes(tmp_path / "oracle.jsonl") == oracle.notes()


def registered(stream: str, offset: int, said: str, verdict: str = "accepted") -> Line:
    """A registration, or the start of a task, in the ledger."""
    record_type = "job.registered" if stream.startswith("job/") else "task.started"
    name = record_type.partition(".")[2]
    return Line(1, offset, stream, record_type, verdict, name, content_hash(said), "running")


def test_what_was_taken_and_handed_to_nobody_is_lost(oracle: Oracle) -> None:
    def found_in(evidence: Evidence, reader: Reader) -> set[str]:
        return {finding.kind for finding in compare(oracle.notes(), evidence, [reader])}

    assert found_in(good(), Reader(BOX)) == set()
    for status in ("claimed", "read"):
        evidence = good()
        for shows in (evidence.views, *evidence.others):
            shows.mail[BOX, "m2"] = mail(2, status)
        assert found_in(evidence, Reader(BOX)) == {LOST}
        # It stands in its reader's file.
        evidence.in_files[BOX, "m2"] = 1
        assert found_in(evidence, Reader(BOX)) == set()


def test_what_waits_although_its_reader_is_there_to_the_end_is_lost(oracle: Oracle) -> None:
    found = compare(oracle.notes(), good(), [Reader(BOX, gets_all=True)])
    assert [(finding.kind, finding.what.split()[1]) for finding in found] == [(LOST, "m1"), (LOST, "m2")]
    evidence = good()
    evidence.in_files.update({(BOX, "m1"): 1, (BOX, "m2"): 1})
    assert compare(oracle.notes(), evidence, [Reader(BOX, gets_all=True)]) == []
    evidence.in_files[BOX, "m1"] = 2
    (found,) = compare(oracle.notes(), evidence, [Reader(BOX, gets_all=True)])
    assert found.kind == DUPLICATE


@pytest.mark.parametrize(("one", "other"), [(JOB, "job/11111111"), (TASK, "task/8e")])
def test_a_request_that_makes_two_jobs_or_tasks_is_a_duplicate(oracle: Oracle, one: str, other: str) -> None:
    evidence = good()
    evidence.ledger += [registered(one, 0, "read it"), registered(one, 1, "read it", "duplicate")]
    assert compare(oracle.notes(), evidence) == []
    evidence.ledger.append(registered(other, 2, "read it"))
    assert kinds(oracle, evidence) == {DUPLICATE}


def test_a_job_with_another_description_than_was_asked_for_is_divergent(oracle: Oracle) -> None:
    oracle.acked("http", JOB, "registered", "boss", content_hash("read it"), ordered=False)
    evidence = good()
    evidence.ledger.append(registered(JOB, 0, "read it"))
    assert compare(oracle.notes(), evidence) == []
    evidence.ledger[-1] = registered(JOB, 0, "burn it")
    assert kinds(oracle, evidence) == {DIVERGENT}


def test_the_content_of_jobs_and_tasks_is_read_from_the_ledgers_bytes() -> None:
    row = {"partition": 0, "offset": 1, "stream_kind": "job", "stream_id": "7f", "verdict": "accepted"}
    row |= {"ce_id": "x", "seq": None, "status_after": "pending", "reason": None}
    row |= {"value": b'{"description":"read it"}'}
    rows = [row | {"type": record_type} for record_type in ("job.registered", "task.started")]
    lines = lines_of(pa.Table.from_pylist(rows))
    assert [(line.id, line.hash) for line in lines] == [
        ("registered", content_hash("read it")),
        ("started", content_hash("read it")),
    ]


def test_a_task_that_changes_after_its_end_is_found(oracle: Oracle) -> None:
    evidence = good()
    evidence.ledger += [Line(2, 1, TASK, "task.cancelled", "accepted", "c", "", "cancelled")]
    assert compare(oracle.notes(), evidence) == []
    evidence.ledger += [Line(2, 2, TASK, "task.completed", "accepted", "d", "", "completed")]
    assert kinds(oracle, evidence) == {CHANGED}


def test_not_at_rest_only_what_nothing_under_way_can_mend_is_found(oracle: Oracle) -> None:
    evidence = good()
    for reader in (evidence.views, *evidence.others):
        reader.states[JOB] = "running"
        reader.mail[BOX, "m3"] = mail(3, "unread")
        del reader.mail[BOX, "m1"]
    del evidence.ledger[0]
    evidence.differences.append("registry_jobs 0a1b2c3d: 1 | 2")
    assert kinds(oracle, evidence) == {LOST, DIVERGENT, CHANGED}
    assert compare(oracle.notes(), evidence, [Reader(BOX, gets_all=True)], is_at_rest=False) == []
    evidence.ledger.append(posted(2, 20))
    oracle.note(Note(FORGED, "mqtt", JOB, "2", hash=content_hash("progress", "step 2")))
    found = compare(oracle.notes(), evidence, is_at_rest=False)
    assert {finding.kind for finding in found} == {DUPLICATE, DIVERGENT}


def test_it_is_not_at_rest_before_what_was_handed_out_is_claimed_and_readers_have_all(oracle: Oracle) -> None:
    def what(shows: Shown, *readers: Reader) -> str:
        return owed(oracle.notes(), shows, readers, {}) or ""

    assert what(good().views) == ""
    assert "handed out, and not claimed" in what(shown("gateway", mail(1), mail(2), mail(3)))
    assert "not in its mailbox" in what(shown("gateway", mail(1), mail(3, "claimed")))
    assert "m1 is unread" in what(good().views, Reader(BOX, gets_all=True))
    oracle.note(Note(ASKED, "xml", "mailbox/default/w", "x", recipient=BOX, kind="worked", body="<n>1</n>"))
    assert "no answer" in what(good().views)


@pytest.mark.parametrize(
    ("place", "row", "kind"),
    [
        pytest.param(0, posted(1, 10, "rejected"), LOST, id="rejected after its acknowledgement"),
        pytest.param(2, posted(2, 12), DUPLICATE, id="an id accepted twice"),
        pytest.param(-1, event(3, 7, "completed"), CHANGED, id="an event accepted after the end"),
    ],
)
def test_a_wrong_row_of_the_ledger_is_found(oracle: Oracle, place: int, row: Line, kind: str) -> None:
    evidence = good()
    evidence.ledger[place] = row
    assert kinds(oracle, evidence) == {kind}
