"""Derived records of schedules: the message of each run, and the report that it was refused (DL-23).

The message depends on the accepted record about the run alone. So a run has one message, whose id is the same
at every gateway and after every restart.
"""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

from connectors.hub.reactor.derived_records import BY_REACTOR, derived_id
from connectors.hub.reactor.known_recipients import GetRow
from connectors.hub.reactor.limits_of_principals import limits_of
from schemas.streams.mailboxes.message import MESSAGE_POSTED, verified_message
from schemas.streams.schedule.schedule_registry import (
    SCHEDULE_RAN,
    SCHEDULE_REFUSED,
    ScheduleRan,
    ScheduleRefused,
    ScheduleRow,
)
from schemas.wire.record import OutgoingRecord, Record
from trunkline_agent.wire.ids import SCHEDULE
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED

_RAN: Final = SCHEDULE_RAN.encode()
_TYPE: Final = 3


def is_run(record: Record) -> bool:
    """Return whether `messages_of_run` may return a record for `record`, so that its verdict is needed."""
    return len(record.header_values) > _TYPE and record.header_values[_TYPE] == _RAN


def run_of(record: Record) -> ScheduleRan | None:
    """Return the body of a record `schedule.ran`, None for any other record. The record may be rejected."""
    if not is_run(record):
        return None
    try:
        return ScheduleRan.model_validate(decode(record.value or b"")[0])
    except (ValidationError, MalformedJsonError):
        return None


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


def messages_of_run(record: Record, verdict: str, get: GetRow) -> list[OutgoingRecord]:
    """Return the record that posts the message of a schedule's run, in a list.

    The list is empty unless `record` is an accepted `schedule.ran`. The message's `sent_at` is the run's time.

    Args:
        record: A settled record of any type.
        verdict: Its verdict: accepted, duplicate or rejected.
        get: The look-up of rows, such as `LiveView.get`, from which the message has the limits of its mailbox.
    """
    run = run_of(record) if verdict == ACCEPTED else None
    if run is None or _is_refused(run, get(ScheduleRow, run.name)):
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
        **limits_of(get, run.recipient).of_mailbox,
    )
    return [message.record(**BY_REACTOR)]
