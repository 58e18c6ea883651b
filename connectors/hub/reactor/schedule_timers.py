"""The timers of schedules: each run is recorded when its time comes (DL-23)."""

from __future__ import annotations

from connectors.hub.reactor.derived_records import BY_REACTOR, derived_id
from connectors.hub.reactor.known_recipients import GetRow
from connectors.hub.reactor.timers import Timers
from schemas.streams.principal import principals
from schemas.streams.principal.principals import PrincipalRow
from schemas.streams.schedule.schedule_registry import (
    SCHEDULE_MISSED,
    SCHEDULE_RAN,
    SCHEDULE_REMOVED,
    ScheduleMissed,
    ScheduleRan,
    ScheduleRemoved,
    ScheduleRow,
    message_fields,
    next_run,
)
from schemas.streams.task.task_registry import TASK_TERMINAL, TaskRow, TokenRow
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.ids import SCHEDULE, stream_key


class ScheduleTimers(Timers[ScheduleRow]):
    """The timers of all active schedules. For the arguments see `Timers`.

    The record says that the next run took place or was missed. If the fold accepts the record of a run, the
    reactor posts its message. A schedule whose owner may no longer send messages is removed instead.
    """

    thread_name = "schedule-timers"
    row_type = ScheduleRow
    follows = (ScheduleRow,)

    def stream_of(self, row: ScheduleRow) -> str:
        """Return the schedule's stream."""
        return stream_key(SCHEDULE, row.schedule)

    def moment_of(self, row: ScheduleRow) -> int | None:
        """Return the time of the next run, in microseconds since 1970 UTC; None for a removed schedule."""
        return row.next_run_at

    def record_of(self, row: ScheduleRow, now_us: int) -> OutgoingRecord:
        """Return the record that the schedule ran, that it missed its run, or that it is removed."""
        cause = f"{row.key}/{row.revision}/{row.next_run_at}"
        if has_lost_owner(self._live_view.get, row, now_us):
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
