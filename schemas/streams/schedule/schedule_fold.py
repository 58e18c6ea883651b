"""The fold of the stream `schedule/<name>`: a message that is posted again and again (DL-23).

The state has these entries: `schedule`, the row; `requests`, a memory of the requests that set or remove it;
and `runs`, a memory of its runs, which all gateways record. `requests/...` and `runs/...` have older ones. They
remain after the schedule is removed, so the revisions of a name go on.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from schemas.fold.entries import StructEntries
from schemas.fold.request_fold import RequestFold, Requests
from schemas.fold.settled import Outcome, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind, wrong_state
from schemas.streams.schedule.run_times import RunTimes
from schemas.streams.schedule.schedule_registry import (
    ACTIVE,
    GRACE_US,
    REMOVED,
    SCHEDULE_MISSED,
    SCHEDULE_MODELS,
    SCHEDULE_RAN,
    SCHEDULE_REFUSED,
    SCHEDULE_REMOVED,
    SCHEDULE_SET,
    SCHEDULE_TRANSITIONS,
    SKIP,
    ScheduleRow,
    message_fields,
)
from schemas.wire.record import JSON_CONTENT
from trunkline_agent.wire.ids import SCHEDULE
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, MALFORMED, SEQ_CONFLICT


def _set(given: FoldInput, known: ScheduleRow | None) -> ScheduleRow | Outcome:
    body = given.body
    if known is not None and known.status == ACTIVE and (refusal := _foreign(given, known)) is not None:
        return refusal
    cron, every_s = body.get("cron"), body.get("every_s")
    next_run_at = RunTimes(cron, every_s).first(given.now_us)
    if next_run_at is None:
        status = None if known is None else known.status
        return rejected(MALFORMED, "the schedule has no run up to the year 9999", status)
    return ScheduleRow(
        schedule=given.name,
        status=ACTIVE,
        owner=given.envelope.principal,
        from_task=body.get("from_task"),
        cron=cron,
        every_s=every_s,
        recipient=body["recipient"],
        kind=body["kind"],
        body=body["body"],
        content_type=body.get("content_type", JSON_CONTENT),
        priority=body.get("priority", "normal"),
        expires_in_ms=body.get("expires_in_ms"),
        missed=body.get("missed", SKIP),
        revision=1 if known is None else known.revision + 1,
        set_at=given.now_us,
        next_run_at=next_run_at,
    )


def _foreign(given: FoldInput, known: ScheduleRow) -> Outcome | None:
    """Return the rejection of a request about another principal's schedule.

    The gateway checks the owner, too, but another gateway may have settled a request at the same moment.
    """
    # An agent may have the name of a principal.
    is_owner = (given.envelope.principal, given.body.get("from_task")) == (known.owner, known.from_task)
    if is_owner or given.body.get("takes_over"):
        return None
    return rejected(SEQ_CONFLICT, "another principal has set this schedule", known.status)


def _removed(given: FoldInput, known: ScheduleRow) -> ScheduleRow | Outcome:
    refusal = _foreign(given, known)
    if refusal is not None:
        return refusal
    return replace(known, status=REMOVED, next_run_at=None, removed_at=given.now_us)


def _ran(given: FoldInput, known: ScheduleRow) -> ScheduleRow | Outcome:
    run_at = _due_run(given, known)
    if isinstance(run_at, Outcome):
        return run_at
    if known.is_next_missed(given.now_us):
        return rejected(ILLEGAL_TRANSITION, "the run is left out, because it was missed", known.status)
    fields = message_fields(known)
    if {name: given.body.get(name) for name in fields} != fields:
        return rejected(ILLEGAL_TRANSITION, "the message is not that of the schedule", known.status)
    return replace(
        known,
        next_run_at=known.times.after(run_at, run_at),
        last_run_at=run_at,
        runs=known.runs + 1,
        late_runs=known.late_runs + 1 if given.now_us - run_at > GRACE_US else 0,
    )


def _missed(given: FoldInput, known: ScheduleRow) -> ScheduleRow | Outcome:
    run_at = _due_run(given, known)
    if isinstance(run_at, Outcome):
        return run_at
    if not known.is_next_missed(given.now_us):
        return rejected(ILLEGAL_TRANSITION, "the run was not missed", known.status)
    following = known.next_after_missed(given.now_us)
    until = given.now_us if following is None else following
    left_out = known.missed_runs + known.times.count_from(run_at, until)
    return replace(known, next_run_at=following, missed_runs=left_out, late_runs=0)


def _refused(given: FoldInput, known: ScheduleRow) -> ScheduleRow | Outcome:
    """Count a run whose message was refused as missed. The messages of runs are posted in their order."""
    run_at: int = given.body["run_at"]
    if given.body["revision"] != known.revision:
        return rejected(ILLEGAL_TRANSITION, "the schedule was set anew", known.status)
    if known.last_run_at is None or run_at > known.last_run_at:
        return rejected(ILLEGAL_TRANSITION, "the run has not taken place", known.status)
    if known.refused_run_at is not None and run_at <= known.refused_run_at:
        return rejected(ILLEGAL_TRANSITION, "a later run was refused already", known.status)
    return replace(
        known,
        runs=known.runs - 1,
        missed_runs=known.missed_runs + 1,
        refused_run_at=run_at,
        refused_reason=given.body["reason"],
    )


def _due_run(given: FoldInput, known: ScheduleRow) -> int | Outcome:
    """Return the time of the schedule's next run, or the rejection of a record that is not about this run."""
    if known.status != ACTIVE:
        return wrong_state(SCHEDULE_TRANSITIONS, known.status, "schedule")
    body = given.body
    if body["revision"] != known.revision:
        return rejected(ILLEGAL_TRANSITION, "the schedule was set anew", known.status)
    run_at: int = body["run_at"]
    if run_at != known.next_run_at:
        return rejected(ILLEGAL_TRANSITION, "this is not the schedule's next run", known.status)
    if given.now_us < run_at:
        return rejected(ILLEGAL_TRANSITION, "the time of the run has not come", known.status)
    return run_at


# A schedule may run so often that its runs would displace the requests from one common memory.
_RUNS: Final = Requests("runs")
_FOLD: Final = RequestFold(
    StructEntries("schedule", ScheduleRow),
    {
        SCHEDULE_SET: _set,
        SCHEDULE_REMOVED: _removed,
        SCHEDULE_RAN: _ran,
        SCHEDULE_MISSED: _missed,
        SCHEDULE_REFUSED: _refused,
    },
    begins=(SCHEDULE_SET,),
    unknown="no schedule with this name",
    noun="schedule",
    transitions=SCHEDULE_TRANSITIONS,
    leads_to={SCHEDULE_REMOVED: REMOVED},
    apart=dict.fromkeys((SCHEDULE_RAN, SCHEDULE_MISSED, SCHEDULE_REFUSED), _RUNS),
)
SCHEDULE_KIND: Final = StreamKind(
    name=SCHEDULE,
    models=SCHEDULE_MODELS,
    settle=_FOLD.settle,
    row_of_each_stream=(ScheduleRow,),
    rows=(ScheduleRow,),
    named_by="name",
)
