"""The demo's plan says what the fold will do, and the comparison finds whatever differs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from connectors.tools.demo.outcome import Outcome, compare, in_scope
from connectors.tools.demo.plan import JOBS_LEAST
from tests.connectors.tools.demo.folded_plan import FoldedPlan, plan_of
from trunkline_agent.wire.verdicts import DOOR_REASONS, FOLD_FAILED, REASONS, TOO_LATE, UNAUTHENTICATED_RECORD


@pytest.fixture(scope="module")
def folded() -> FoldedPlan:
    return FoldedPlan(plan_of(20))


def _compared(folded: FoldedPlan, rows: list[dict[str, Any]]) -> Outcome:
    return compare(rows, folded.deliveries, folded.plan.states)


@pytest.mark.parametrize(("jobs", "seed"), [(JOBS_LEAST, 0), (20, 1), (20, 2), (60, 3)])
def test_the_fold_settles_every_planned_message_as_the_plan_says(jobs: int, seed: int) -> None:
    folded = FoldedPlan(plan_of(jobs, seed))
    steps = [step for _, step in folded.plan.steps()]
    for step, settled in zip(steps, folded.settled, strict=True):
        got = (settled.verdict, settled.reason, settled.late, settled.masked)
        assert got == step.expected, step.label
    outcome = _compared(folded, folded.row_dicts())
    assert outcome.differences == []
    assert outcome.sent == folded.plan.sent
    assert outcome.rejected == dict(folded.rejected())
    assert outcome.jobs == dict(Counter(folded.plan.states.values()))


def test_every_reason_a_sender_can_cause_in_a_short_run_is_in_the_plan(folded: FoldedPlan) -> None:
    assert set(folded.rejected()) == set(REASONS) - {TOO_LATE, FOLD_FAILED, UNAUTHENTICATED_RECORD} - set(
        DOOR_REASONS
    )
    assert folded.count("duplicate") >= 5
    assert set(folded.plan.states.values()) == {"pending", "running", "completed", "error", "cancelled"}


def test_the_same_arguments_give_the_same_plan_and_another_seed_another() -> None:
    assert plan_of(20, 5) == plan_of(20, 5)
    assert plan_of(20, 5) != plan_of(20, 6)


def test_too_few_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match=str(JOBS_LEAST)):
        plan_of(JOBS_LEAST - 1)


def test_a_ledger_that_lacks_a_row_is_named(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    lost = next(row for row in rows if row["reason"] == "bad_signature")
    rows.remove(lost)
    told = "\n".join(_compared(folded, rows).differences)
    assert f"job/{lost['stream_id']}" in told
    assert "planned rejected bad_signature" in told


def test_a_row_with_a_wrong_reason_is_named(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    wrong = next(row for row in rows if row["reason"] == "after_terminal")
    wrong["reason"] = "malformed"
    told = _compared(folded, rows).differences
    assert any(f"job/{wrong['stream_id']}" in t and "the ledger has rejected malformed" in t for t in told)


def test_a_row_that_nobody_sent_is_named(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    rows.append({**rows[-1], "ce_id": "never-sent", "offset": len(rows)})
    assert any("sent by nobody" in told for told in _compared(folded, rows).differences)


def test_a_missing_mask_is_named(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    next(row for row in rows if row["masked"] == "detail")["masked"] = None
    assert any("masked: detail" in told for told in _compared(folded, rows).differences)


def test_one_more_duplicate_of_an_accepted_event_is_no_difference(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    again = next(row for row in rows if row["verdict"] == "duplicate")
    rows.append({**again, "offset": len(rows)})
    outcome = _compared(folded, rows)
    assert outcome.differences == []
    assert outcome.sent == folded.plan.sent + 1


def test_a_rejected_message_that_mqtt_delivers_twice_is_no_difference(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    again = next(row for row in rows if row["reason"] == "bad_signature")
    rows.append({**again, "offset": len(rows)})
    outcome = _compared(folded, rows)
    assert outcome.differences == []
    assert outcome.rejected["bad_signature"] == folded.rejected()["bad_signature"] + 1


def test_a_rejection_that_was_planned_as_accepted_is_named_however_often_it_came(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    accepted = next(row for row in rows if row["verdict"] == "accepted" and row["type"] == "job.event")
    rows.append({**accepted, "offset": len(rows), "verdict": "rejected", "reason": "bad_signature"})
    (told,) = _compared(folded, rows).differences
    assert "planned nothing more, the ledger has rejected bad_signature instead" in told


def test_a_duplicate_with_other_content_than_the_accepted_event_is_named(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    next(row for row in rows if row["verdict"] == "duplicate")["value"] = b'{"other":1}'
    assert any("a duplicate of no accepted event" in told for told in _compared(folded, rows).differences)


def test_a_job_in_a_wrong_state_is_named(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    end = next(r for r in rows if r["status_after"] == "completed" and r["verdict"] == "accepted")
    end["status_after"] = "error"
    told = f"job {end['stream_id']}: planned to be completed, it is error"
    assert told in _compared(folded, rows).differences


def test_rows_of_other_jobs_in_an_older_ledger_do_not_count(folded: FoldedPlan) -> None:
    rows = folded.row_dicts()
    other = {**rows[-1], "stream_kind": "job", "stream_id": "dddddddd", "ce_id": "another's"}
    job_ids = [*folded.plan.states, "eeeeeeee"]
    assert in_scope([*rows, other], folded.deliveries, job_ids) == rows
