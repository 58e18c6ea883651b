"""The records that follow from a schedule: each run at its time, its message, and its refusal (DL-23).

The message depends on the accepted record about the run alone. So a run has one message, whose id is the same
at every gateway and after every restart.
"""

from __future__ import annotations

from typing import Final

from schemas.effects.following import BY_REACTOR, Cause, Follows, GetRow, Timer, derived_id
from schemas.effects.recipients import limits_of
from schemas.streams.mailboxes.message import MESSAGE_POSTED, verified_message
from schemas.streams.principal import principals
from schemas.streams.principal.principals import PrincipalRow
from schemas.streams.schedule.schedule_registry import (
    SCHEDULE_MISSED,
    SCHEDULE_RAN,
    SCHEDULE_REFUSED,
    SCHEDULE_REMOVED,
    ScheduleMissed,
    ScheduleRan,
    ScheduleRefused,
    ScheduleRemoved,
    ScheduleRow,
    message_fields,
    next_run,
)
from schemas.streams.task.task_registry import TASK_TERMINAL, TaskRow, TokenRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.ids import SCHEDULE, stream_key
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED


def message_id_of(run: ScheduleRan) -> str:
    """Return the id of the message of a run."""
    return derived_id(f"{SCHEDULE}/{run.name}/{run.revision}/{run.run_at}", MESSAGE_POSTED)


def refusal_of_run(run: ScheduleRan, reason: str | None) -> OutgoingRecord:
    """Return the record that the mailbox refused the message of a run, for `reason`."""
    body = ScheduleRefused(name=run.name, revision=run.revision, run_at=run.run_at, reason=reason or REJECTED)
    return body.record(ce_id=derived_id(message_id_of(run), SCHEDULE_REFUSED), **BY_REACTOR)


def _is_refused(run: ScheduleRan, row: ScheduleRow | None) -> bool:
    """Return whether a run or a later one is counted as refused. Then its message was posted before."""
    if row is None or row.revision != run.revision or row.refused_run_at is None:
        return False
    return run.run_at <= row.refused_run_at


def _message_of_run(cause: Cause) -> list[OutgoingRecord]:
    """Post the message of a schedule's run. Its `sent_at` is the run's time."""
    run = cause.body_as(ScheduleRan) if cause.verdict == ACCEPTED else None
    if run is None or _is_refused(run, cause.get(ScheduleRow, run.name)):
        return []
    message = verified_message(
        message_id_of(run),
        run.sender,
        run.recipient,
        run.kind,
        run.body,
        run.content_type,
        priority=run.priority,
        expires_in_ms=run.expires_in_ms,
        sent_at=iso_moment(run.run_at),
        **limits_of(cause.get, run.recipient).of_mailbox,
    )
    return [message.record(**BY_REACTOR)]


def _record_of(row: ScheduleRow, now_us: int, get: GetRow) -> OutgoingRecord:
    """Return the record that the schedule ran, that it missed its run, or that it is removed.

    A schedule whose owner may no longer send messages is removed.
    """
    cause = f"{row.key}/{row.revision}/{row.next_run_at}"
    if has_lost_owner(get, row, now_us):
        ce_id = derived_id(cause, SCHEDULE_REMOVED)
        removed = ScheduleRemoved(name=row.schedule, request_id=ce_id, takes_over=True)
        return removed.record(ce_id=ce_id, **BY_REACTOR)
    if row.is_next_missed(now_us):
        missed = ScheduleMissed(**next_run(row))
        return missed.record(ce_id=derived_id(cause, SCHEDULE_MISSED), **BY_REACTOR)
    ran = ScheduleRan(**next_run(row), **message_fields(row))
    return ran.record(ce_id=derived_id(cause, SCHEDULE_RAN), **BY_REACTOR)


def has_lost_owner(get: GetRow, row: ScheduleRow, now_us: int) -> bool:
    """Return whether the token with which a schedule was set is no longer valid.

    The token of a principal is valid until its revocation. That of a task is valid until its expiry or its
    revocation, at the latest at the end of the task.

    Args:
        get: The look-up of rows, such as `LiveView.get`.
        row: The schedule.
        now_us: The present in microseconds since 1970 UTC.
    """
    if row.from_task is None:
        principal = get(PrincipalRow, row.owner)
        return principal is not None and principal.status != principals.ACTIVE
    task = get(TaskRow, row.from_task)
    if task is None:
        return False  # the live view has not settled it yet
    token = None if task.token_id is None else get(TokenRow, task.token_id)
    is_valid = token is None or (token.status == principals.ACTIVE and token.expiry * 1000 > now_us)
    return task.status in TASK_TERMINAL or not is_valid


SCHEDULE_FOLLOWS: Final = (Follows(frozenset({SCHEDULE_RAN}), _message_of_run, lambda _: True),)
SCHEDULE_TIMER: Final = Timer(
    ScheduleRow, lambda row: stream_key(SCHEDULE, row.schedule), lambda row, _: row.next_run_at, _record_of
)
