"""Runs of a schedule whose messages a mailbox refused, as the schedule's stream counts them."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.streams.schedule.schedule_registry import ScheduleRan, ScheduleRefused
from schemas.wire.record import OutgoingRecord
from tests.schemas.job_records import START_US, said
from tests.schemas.mailbox_records import S_US, at
from tests.schemas.streams.test_schedule_fold import REACTOR, made, ran, refused, removal, row_of
from trunkline_agent.wire.strict_json import decode


@pytest.mark.requirement("ST-82")
def test_a_run_whose_message_was_refused_counts_as_missed_once() -> None:
    entries, row = made()
    runs = []
    for _ in range(3):
        record = ran(row)
        runs.append(ScheduleRan.model_validate(decode(record.value)[0]))
        row = row_of(at(row.next_run_at - START_US, record, entries))
    now = row.last_run_at - START_US + S_US

    def refusal(run: ScheduleRan, number: int = 0, **changed: Any) -> OutgoingRecord:
        of = run.model_copy(update=changed)
        body = ScheduleRefused(name=of.name, revision=of.revision, run_at=of.run_at, reason="mailbox_full")
        return body.record(ce_id=f"refused {run.run_at} {number}", **REACTOR)

    row = row_of(at(now, refusal(runs[1]), entries))
    assert (row.runs, row.missed_runs, row.late_runs) == (2, 1, 0)
    assert (row.refused_run_at, row.refused_reason) == (runs[1].run_at, "mailbox_full")
    assert said(at(now, refusal(runs[1]), entries)) == ("duplicate", None)
    for one in (runs[0], runs[1]):
        refused(at(now, refusal(one, 1), entries), "illegal_transition", "a later run was refused")
    refused(at(now, refusal(runs[2], 2, revision=2), entries), "illegal_transition", "set anew")
    late = refusal(runs[2], 3, run_at=row.next_run_at)
    refused(at(now, late, entries), "illegal_transition", "has not taken place")
    at(now, removal(), entries)
    row = row_of(at(now, refusal(runs[2]), entries))
    assert (row.runs, row.missed_runs, row.status) == (1, 2, "removed")
