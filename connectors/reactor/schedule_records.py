"""Derived records of schedules: the message of each run (DL-23).

The message depends on the accepted record about the run alone. So a run has one message, whose id is the same
at every gateway and after every restart.
"""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

from connectors.reactor.derived_records import BY_REACTOR, derived_id
from connectors.reactor.known_recipients import GetRow
from connectors.reactor.limits_of_principals import limits_of
from schemas.streams.mailboxes.message import MESSAGE_POSTED, posting_record, verified_message
from schemas.streams.schedule.schedule_registry import SCHEDULE_RAN, ScheduleRan
from schemas.wire.record import OutgoingRecord, Record
from trunkline_agent.wire.ids import SCHEDULE
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.verdicts import ACCEPTED

_RAN: Final = SCHEDULE_RAN.encode()
_TYPE: Final = 3


def is_run(record: Record) -> bool:
    """Return whether `messages_of_run` may return a record for `record`, so that its verdict is needed."""
    return len(record.header_values) > _TYPE and record.header_values[_TYPE] == _RAN


def messages_of_run(record: Record, verdict: str, get: GetRow) -> list[OutgoingRecord]:
    """Return the record that posts the message of a schedule's run, in a list.

    The list is empty unless `record` is an accepted `schedule.ran`. The message's `sent_at` is the run's time.

    Args:
        record: A settled record of any type.
        verdict: Its verdict: accepted, duplicate or rejected.
        get: The look-up of rows, such as `LiveView.get`, from which the message has the limits of its mailbox.
    """
    if verdict != ACCEPTED or not is_run(record):
        return []
    try:
        run = ScheduleRan.model_validate(decode(record.value or b"")[0])
    except (ValidationError, MalformedJsonError):
        return []
    message = verified_message(
        derived_id(f"{SCHEDULE}/{run.name}/{run.revision}/{run.run_at}", MESSAGE_POSTED),
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
    return [posting_record(message, **BY_REACTOR)]
