"""A schedule as its stream settles it (DL-23): who may set it, and which runs are posted or left out."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.schedule import schedule_registry as registry
from schemas.streams.schedule.schedule_registry import (
    GRACE_US,
    LATE_RUNS_MOST,
    ScheduleMissed,
    ScheduleRan,
    ScheduleRemoved,
    ScheduleRow,
    ScheduleSet,
    message_fields,
    next_run,
)
from schemas.wire.record import OutgoingRecord
from tests.schemas.hub_records import run, schedule
from tests.schemas.job_records import START_US, said
from tests.schemas.mailbox_records import S_US, at
from tests.schemas.stream_records import accepted_and_refolded, as_read
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("DL-23")

REACTOR: dict[str, Any] = {"door": "reactor", "principal": "reactor"}
WEEK_US = 7 * 86_400 * S_US
TIMINGS = (*({"every_s": every_s} for every_s in (7, 61, 3600)), {"cron": "*/3 * * * *"}, {"cron": "5 8 * * 6"})
STEPS_S = (1, 5, 40, 60, 61, 100, 200, 3600, 90_000)


def set_record(request_id: str = "s1", by: str = "ann", **changed: Any) -> OutgoingRecord:
    """The record that sets the schedule; without another timing, it runs every minute."""
    body = ScheduleSet.model_validate(schedule(request_id, **changed))
    return body.record(door="http", principal=by)


def removal(request_id: str = "x1", by: str = "ann", **changed: Any) -> OutgoingRecord:
    """The record that removes the schedule."""
    body = ScheduleRemoved(name="tea", request_id=request_id, **changed)
    return body.record(door="http", principal=by)


def row_of(settled: Settled) -> ScheduleRow:
    """The row that an accepted record makes."""
    assert said(settled) == ("accepted", None), settled.why
    (change,) = settled.changes
    assert (change.view, change.key) == ("registry_schedules", "tea")
    assert isinstance(change.row, ScheduleRow)
    return change.row


def refused(settled: Settled, reason: str, why: str) -> None:
    """The record changes nothing, for this reason."""
    assert (settled.reason, settled.changes) == (reason, ())
    assert why in str(settled.why)


def ran(row: ScheduleRow, **changed: Any) -> OutgoingRecord:
    """The record of the schedule's next run, with fields of the row changed."""
    row = replace(row, **changed)
    body = ScheduleRan(**next_run(row), **message_fields(row))
    return body.record(ce_id=f"run {row.revision}/{row.next_run_at}", **REACTOR)


def missed(row: ScheduleRow) -> OutgoingRecord:
    """The record that the schedule's next run is left out."""
    body = ScheduleMissed(**next_run(row))
    return body.record(ce_id=f"missed {row.revision}/{row.next_run_at}", **REACTOR)


def made(**changed: Any) -> tuple[Entries, ScheduleRow]:
    """A schedule that was set at the start: its entries and its row."""
    entries = Entries()
    return entries, row_of(at(0, set_record(**changed), entries))


def test_a_schedule_that_is_set_has_its_first_run_and_the_principal_as_owner() -> None:
    _, row = made(every_s=90, priority="high", expires_in_ms=1000, missed="latest")
    assert row == ScheduleRow(
        schedule="tea",
        status="active",
        owner="ann",
        from_task=None,
        cron=None,
        every_s=90,
        recipient="bo",
        kind="remind",
        body='{"text":"tea"}',
        content_type="application/json",
        priority="high",
        expires_in_ms=1000,
        missed="latest",
        revision=1,
        set_at=START_US,
        next_run_at=START_US + 90 * S_US,
    )
    assert (row.is_live, row.lists) == (True, ())
    _, row = made(every_s=None, cron="0 9 * * *")
    assert (row.next_run_at, row.missed, row.priority) == (START_US + 3600 * S_US, "skip", "normal")


def test_a_run_is_accepted_at_its_time_and_not_a_microsecond_earlier() -> None:
    entries, row = made()
    refused(at(60 * S_US - 1, ran(row), entries), "illegal_transition", "has not come")
    after = row_of(at(60 * S_US, ran(row), entries))
    assert (after.last_run_at, after.next_run_at) == (START_US + 60 * S_US, START_US + 120 * S_US)
    assert (after.runs, after.missed_runs, after.late_runs, after.revision) == (1, 0, 0, 1)


def test_the_run_that_each_gateway_records_counts_once_also_behind_later_runs() -> None:
    entries, row = made()
    first = ran(row)
    row = row_of(at(60 * S_US, first, entries))
    assert said(at(60 * S_US, first, entries)) == ("duplicate", None)
    row_of(at(120 * S_US, ran(row), entries))
    assert said(at(121 * S_US, first, entries)) == ("duplicate", None)
    refused(at(121 * S_US, ran(row, body="{}"), entries), "seq_conflict", "other content")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"revision": 2}, "set anew"),
        ({"next_run_at": START_US + 120 * S_US}, "not the schedule's next run"),
        ({"next_run_at": START_US}, "not the schedule's next run"),
        ({"owner": "bo"}, "not that of the schedule"),
        ({"recipient": "cy"}, "not that of the schedule"),
        ({"kind": "other"}, "not that of the schedule"),
        ({"body": "{}"}, "not that of the schedule"),
        ({"content_type": "text/plain"}, "not that of the schedule"),
        ({"priority": "high"}, "not that of the schedule"),
        ({"expires_in_ms": 1}, "not that of the schedule"),
    ],
)
def test_a_run_of_another_revision_time_or_message_is_refused(changed: dict[str, Any], why: str) -> None:
    entries, row = made()
    refused(at(120 * S_US, ran(row, **changed), entries), "illegal_transition", why)
    refused(at(60 * S_US, missed(row), entries), "illegal_transition", "was not missed")


def test_a_run_without_the_expiry_of_the_schedule_is_refused() -> None:
    entries, row = made(expires_in_ms=5)
    refused(at(60 * S_US, ran(row, expires_in_ms=None), entries), "illegal_transition", "not that of")
    row_of(at(60 * S_US, ran(row), entries))


def test_a_schedule_that_is_set_anew_begins_anew_and_runs_of_the_old_one_are_refused() -> None:
    entries, old = made()
    row_of(at(60 * S_US, ran(old), entries))
    new = row_of(at(90 * S_US, set_record("s2", every_s=10, kind="other"), entries))
    assert (new.revision, new.runs, new.last_run_at) == (2, 0, None)
    assert new.next_run_at == START_US + 100 * S_US
    late = replace(old, next_run_at=START_US + 120 * S_US)
    refused(at(120 * S_US, ran(late), entries), "illegal_transition", "set anew")
    refused(at(120 * S_US, missed(late), entries), "illegal_transition", "set anew")
    # The run of the old one that was accepted is still known.
    assert said(at(120 * S_US, ran(old), entries)) == ("duplicate", None)
    row_of(at(120 * S_US, ran(new), entries))


def test_a_repeated_request_is_a_duplicate_after_any_number_of_runs_and_its_id_a_conflict() -> None:
    entries, row = made(every_s=1)
    for number in range(1, 301):
        row = row_of(at(number * S_US, ran(row), entries))
    assert row.runs == 300
    assert said(at(301 * S_US, set_record(every_s=1), entries)) == ("duplicate", None)
    refused(at(301 * S_US, set_record(every_s=2), entries), "seq_conflict", "other content")


def test_another_principal_neither_replaces_nor_removes_a_schedule_unless_it_may_do_so_to_all() -> None:
    entries, _ = made()
    refused(at(1, set_record("s2", by="bo"), entries), "seq_conflict", "another principal")
    refused(at(1, removal(by="bo"), entries), "seq_conflict", "another principal")
    row = row_of(at(2, set_record("s3", by="root", takes_over=True), entries))
    assert (row.owner, row.revision) == ("root", 2)
    refused(at(3, removal("x2"), entries), "seq_conflict", "another principal")
    assert row_of(at(4, removal("x3", by="reactor", takes_over=True), entries)).status == "removed"


def test_a_tasks_agent_and_a_principal_of_its_name_do_not_change_each_others_schedules() -> None:
    entries, row = made(from_task="t1")
    assert (row.owner, row.from_task) == ("ann", "t1")
    for other in ({}, {"from_task": "t2"}):
        refused(at(1, set_record("s2", **other), entries), "seq_conflict", "another principal")
        refused(at(1, removal(**other), entries), "seq_conflict", "another principal")
    assert row_of(at(2, set_record("s3", from_task="t1"), entries)).revision == 2
    assert row_of(at(3, removal("x2", from_task="t1"), entries)).status == "removed"
    entries, _ = made()
    refused(at(1, removal(from_task="t1"), entries), "seq_conflict", "another principal")


def test_a_removed_schedule_has_no_run_and_anybody_may_take_its_name_with_the_next_revision() -> None:
    entries, row = made()
    refused(at(1, removal(by="bo"), entries), "seq_conflict", "another principal")
    gone = row_of(at(S_US, removal(), entries))
    assert (gone.status, gone.next_run_at, gone.removed_at) == ("removed", None, START_US + S_US)
    assert (gone.is_live, gone.is_next_missed(START_US + WEEK_US)) == (False, False)
    assert said(at(S_US, removal(), entries)) == ("duplicate", None)
    refused(at(S_US, removal("x2"), entries), "illegal_transition", "the schedule is removed")
    refused(at(60 * S_US, ran(row), entries), "illegal_transition", "the schedule is removed")
    refused(at(WEEK_US, missed(row), entries), "illegal_transition", "the schedule is removed")
    again = row_of(at(WEEK_US, set_record("s2", by="bo"), entries))
    assert (again.status, again.owner, again.revision, again.removed_at) == ("active", "bo", 2, None)


def test_without_a_schedule_there_is_nothing_to_remove_and_no_run() -> None:
    _, row = made()
    for record in (removal(), ran(row), missed(row)):
        refused(at(60 * S_US, record, Entries()), "unknown_stream", "no schedule")


def test_with_skip_a_run_is_posted_until_a_minute_after_its_time_and_then_left_out() -> None:
    entries, row = made(every_s=3600)
    due = 3600 * S_US
    refused(at(due + GRACE_US, missed(row), entries), "illegal_transition", "was not missed")
    refused(at(due + GRACE_US + 1, ran(row), entries), "illegal_transition", "left out")
    after = row_of(at(due + GRACE_US + 1, missed(row), entries))
    assert (after.next_run_at, after.missed_runs, after.runs) == (START_US + 2 * due, 1, 0)
    row_of(at(2 * due + GRACE_US, ran(after), entries))


def test_with_skip_all_runs_that_were_missed_are_left_out_by_one_record() -> None:
    entries, row = made(every_s=25)
    now = 1000 * S_US
    after = row_of(at(now, missed(row), entries))
    # The runs at 950, 975 and 1000 are not more than a minute late.
    assert (after.next_run_at, after.missed_runs) == (START_US + 950 * S_US, 37)
    assert said(at(now, missed(row), entries)) == ("duplicate", None)
    for _ in range(3):
        after = row_of(at(now, ran(after), entries))
    assert (after.next_run_at, after.runs, after.missed_runs) == (START_US + 1025 * S_US, 3, 37)


def test_with_latest_one_run_stands_for_all_that_are_due() -> None:
    entries, row = made(every_s=None, cron="0 * * * *", missed="latest")
    day = 24 * 3600 * S_US
    refused(at(day, ran(row), entries), "illegal_transition", "left out")
    after = row_of(at(day, missed(row), entries))
    assert (after.next_run_at, after.missed_runs, after.runs) == (START_US + day, 23, 0)
    after = row_of(at(day + 3599 * S_US, ran(after), entries))
    assert (after.last_run_at, after.next_run_at) == (START_US + day, START_US + day + 3600 * S_US)
    assert (after.missed_runs, after.runs, after.late_runs) == (23, 1, 1)


def test_with_latest_a_run_is_posted_however_late_if_no_other_one_is_due() -> None:
    entries, row = made(every_s=86_400, missed="latest")
    refused(at(2 * 86_400 * S_US - 1, missed(row), entries), "illegal_transition", "was not missed")
    row_of(at(2 * 86_400 * S_US - 1, ran(row), entries))
    entries, row = made(every_s=86_400, missed="latest")
    refused(at(2 * 86_400 * S_US, ran(row), entries), "illegal_transition", "left out")
    row_of(at(2 * 86_400 * S_US, missed(row), entries))


def test_with_all_each_missed_run_is_posted_up_to_a_thousand_and_the_others_are_left_out() -> None:
    entries, row = made(every_s=1, missed="all")
    now = 5000 * S_US
    for _ in range(LATE_RUNS_MOST):
        refused(at(now, missed(row), entries), "illegal_transition", "was not missed")
        row = row_of(at(now, ran(row), entries))
    assert (row.runs, row.late_runs, row.next_run_at) == (1000, 1000, START_US + 1001 * S_US)
    refused(at(now, ran(row), entries), "illegal_transition", "left out")
    row = row_of(at(now, missed(row), entries))
    assert (row.missed_runs, row.late_runs, row.next_run_at) == (3939, 0, START_US + 4940 * S_US)
    # A run on time ends the succession of late ones.
    for _ in range(61):
        row = row_of(at(now, ran(row), entries))
    assert (row.runs, row.late_runs, row.next_run_at) == (1061, 0, now + START_US + S_US)


def settled_at(now_us: int, record: OutgoingRecord, entries: Entries) -> Settled:
    return at(now_us - START_US, record, entries)


def planned(due: list[int], policy: str, now_us: int, late: int, most: int) -> tuple[list[int], list[int], int]:
    """The plain model: the due runs that are posted, those that are left out, and the newest late ones."""
    posted, left_out = [], []
    for number, run_at in enumerate(due):
        is_late = now_us - run_at > 60 * S_US
        if policy == "latest":
            is_left_out = number + 1 < len(due)
        else:
            is_left_out = is_late and (policy == "skip" or late >= most)
        (left_out if is_left_out else posted).append(run_at)
        if not is_left_out:
            late = late + 1 if is_late else 0
    if left_out:
        late = 0 if policy != "latest" else int(now_us - due[-1] > 60 * S_US)
    return posted, left_out, late


@given(
    st.sampled_from(TIMINGS),
    st.sampled_from(("skip", "latest", "all")),
    st.lists(st.sampled_from(STEPS_S) | st.integers(1, 400), min_size=1, max_size=12),
    st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_runs_never_skip_and_never_repeat_and_are_posted_as_the_plain_model_says(
    timing: dict[str, Any], policy: str, steps_s: list[int], most: int
) -> None:
    entries, row = made(**{"every_s": None, **timing}, missed=policy)
    now_us, late, upcoming = START_US, 0, row.next_run_at
    all_posted: list[int] = []
    with patch.object(registry, "LATE_RUNS_MOST", most):
        for step_s in steps_s:
            now_us += step_s * S_US
            due = []
            while upcoming is not None and upcoming <= now_us:
                due.append(upcoming)
                upcoming = row.times.after(upcoming, upcoming)
            posted, left_out, late = planned(due, policy, now_us, late, most)
            before, found = row, []
            while row.next_run_at is not None and row.next_run_at <= now_us:
                is_missed = row.is_next_missed(now_us)
                record = missed(row) if is_missed else ran(row)
                other = ran(row) if is_missed else missed(row)
                assert settled_at(now_us, other, entries).verdict == "rejected"
                found += [] if is_missed else [row.next_run_at]
                row = row_of(settled_at(now_us, record, entries))
                assert said(settled_at(now_us, record, entries)) == ("duplicate", None)
            assert found == posted
            assert row.runs - before.runs == len(posted)
            assert row.missed_runs - before.missed_runs == len(left_out)
            assert (row.next_run_at, row.late_runs) == (upcoming, late)
            all_posted += found
    assert all_posted == sorted(set(all_posted))


def test_the_ledgers_rows_fold_to_the_same_schedule_again() -> None:
    _, row = made()
    records = [set_record(), ran(row), removal(), set_record("s2", by="bo", every_s=None, cron="0 9 * * *")]
    rows, _ = accepted_and_refolded(
        as_read(made, number, START_US + number * 60 * S_US) for number, made in enumerate(records)
    )
    assert [one.type for one in rows] == ["schedule.set", "schedule.ran", "schedule.removed", "schedule.set"]


@pytest.mark.parametrize(
    "changed",
    [
        {"every_s": None},
        {"cron": "* * * * *"},
        {"every_s": 0},
        {"every_s": 31_536_001},
        {"every_s": 1.5},
        {"every_s": "60"},
        {"every_s": True},
        {"every_s": None, "cron": "0 0 31 2 *"},
        {"every_s": None, "cron": "0 0 * * * *"},
        {"missed": "some"},
        {"priority": "urgent"},
        {"kind": ""},
        {"kind": "k" * 129},
        {"recipient": "not/a/name"},
        {"body": "b" * 65_537},
        {"expires_in_ms": 0},
        {"takes_over": False},
        {"more": 1},
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_at_the_door_and_by_the_fold(changed: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ScheduleSet.model_validate(schedule(**changed))
    good = set_record()
    record = OutgoingRecord(good.stream, "c1", "http", "ann", good.type, canonical(schedule(**changed)))
    assert at(0, record, Entries()).reason == "malformed"


def test_the_fields_of_a_run_are_checked_as_those_of_its_schedule() -> None:
    good = run(START_US)
    for changed in ({"revision": 0}, {"run_at": "1"}, {"body": "b" * 65_537}, {"sender": "a b"}):
        with pytest.raises(ValidationError):
            registry.ScheduleRan.model_validate({**good, **changed})
