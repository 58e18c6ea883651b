"""Functions that compute derived records: the records that the reactor appends because of a settled record.

They use only the settled record and the rows of the live view. So the derived record and its id are the same at
every gateway and after every restart, and the fold accepts it only once. Nothing here appends a record.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final

from pydantic import ValidationError

from connectors.hub.reactor.known_recipients import GetRow
from schemas.fold.life_cycles import STOPPED
from schemas.fold.view_rows import Row
from schemas.streams.agents.participants import AGENT_STOPPED, AgentStopped, ParticipantRow
from schemas.streams.job.job_registry import (
    END,
    JOB_CANCELLED,
    JOB_EVENT,
    JOB_PICKED,
    JOB_TERMINAL,
    JobRow,
    pick_id,
)
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_DUE, MessageDue, MessageReading
from schemas.streams.mailboxes.message import (
    DEFAULT_REALM,
    MESSAGE_PENDING,
    MESSAGE_POSTED,
    Message,
    MessageBodyRow,
    MessageRow,
    verified_message,
)
from schemas.streams.principal.principals import HUB, REACTOR, SENDER
from schemas.streams.session.session_registry import (
    SESSION_CREATED,
    SESSION_JOB_ASSIGNED,
    SESSION_JOB_ENDED,
    TERMINATED,
    SessionJobAssigned,
    SessionJobEnded,
    SessionRow,
)
from schemas.streams.task.task_registry import (
    RESULT_LIMIT_BYTES,
    TASK_COMPLETED,
    TaskCompletion,
    TaskRow,
    result_text,
)
from schemas.wire.record import JSON_CONTENT, BadEnvelopeError, Origin, OutgoingRecord, Record, read_envelope
from schemas.wire.wire_body import NOTE_LIMIT
from trunkline_agent.wire.ids import JOB, MAILBOX, SESSION, TASK, is_name, parse_stream_key
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode

DOOR: Final = "reactor"
BY_REACTOR: Final[Origin] = {"door": DOOR, "principal": REACTOR}
_NAMESPACE: Final = uuid.UUID("5f0c86f1-6c6f-4bb0-9f5e-0d6f3a1c7d52")
_CAUSES: Final = frozenset({JOB_PICKED, JOB_EVENT, JOB_CANCELLED})

MadeFor = Callable[[str], Iterable[str]]
"""`made_for(job_id)`: the names of the sessions made for the job. Ended sessions may be among them."""


def derived_records(record: Record, get: GetRow, made_for: MadeFor) -> list[OutgoingRecord]:
    """Return the records that the reactor has to append because `record` was settled.

    Usually the list is empty. Examples: after a job's end, a message to its delegator and the end of its
    sessions; after a task's end, the stop of the participant that was started for it. A record with invalid
    headers gives an empty list and raises nothing.

    Args:
        record: A settled record of any type.
        get: The look-up of rows, such as `LiveView.get`. The rows must include the effect of `record`, and may
            include that of later records.
        made_for: Returns the names of the sessions that were made for a job, given the job's id.
    """
    stream = parse_stream_key(record.key)
    if stream is None or stream[0] not in (JOB, MAILBOX, SESSION, TASK):
        return []
    try:
        envelope = read_envelope(record)
    except BadEnvelopeError:
        return []
    if envelope.type == MESSAGE_POSTED:
        completion = _completion(record, stream[1], get)
        return [*completion, *system_readings(HUB, envelope.ce_id, stream[1], get)]
    if envelope.type == MESSAGE_DUE:
        return _readings_of_delivered(record, stream[1], get)
    if stream[0] == TASK:
        task = get(TaskRow, stream[1])
        if task is None or task.ended_by != envelope.ce_id:
            return []
        stopped = stopped_with_task(task, get(ParticipantRow, task.agent_name))
        return [] if stopped is None else [stopped]
    if envelope.type == SESSION_CREATED:
        return _end_of_late_session(stream[1], get)
    job = get(JobRow, stream[1]) if envelope.type in _CAUSES else None
    return [] if job is None else _job_records(job, envelope.type, envelope.ce_id, get, made_for)


def _job_records(
    job: JobRow, record_type: str | None, cause: str, get: GetRow, made_for: MadeFor
) -> list[OutgoingRecord]:
    """Return the records that follow when a session picks `job` or when it ends."""
    if record_type == JOB_PICKED:
        # Only the accepted pick has the id of the job's session. A repeated pick has the same id, and so do the
        # records derived from it.
        if job.session is None or cause != pick_id(job.job_id, job.session):
            return []
        assigned = SessionJobAssigned(session=job.session, job_id=job.job_id)
        return [assigned.record(ce_id=derived_id(cause, SESSION_JOB_ASSIGNED), **BY_REACTOR)]
    if cause != job.ended_by or job.status not in JOB_TERMINAL:
        return []
    picker = set() if job.session is None else {job.session}
    made = {name for name in made_for(job.job_id) if _is_alive(get(SessionRow, name))}
    ended = [_session_end(job, name, cause) for name in sorted(picker | made)]
    if job.notify is not None and END not in job.notify:
        return ended
    body = {"job_id": job.job_id, "status": job.status, "detail": job.last_detail}
    return [*ended, *notifications(job, f"job.{job.status}", body, derived_id(cause, MESSAGE_POSTED))]


def notifications(job: JobRow, kind: str, body: dict[str, Any], message_id: str) -> list[OutgoingRecord]:
    """Return the record of a message about `job` to the principal that registered the job, in a list.

    The list is empty if the principal's name is no valid name of a mailbox.

    Args:
        job: The job's row. Its field `registered_by` (`<door>/<principal>`) names the principal.
        kind: The type of the message, such as `job.completed`.
        body: The payload of the message, which becomes JSON.
        message_id: The id of the message. Make it with `derived_id` from the cause of the message. Then a
            message that is posted twice for one cause has one id, and the fold calls the second posting a
            duplicate.
    """
    recipient = job.registered_by.partition("/")[2]
    return [message_from_hub(recipient, kind, body, message_id)] if is_name(recipient) else []


def message_from_hub(
    recipient: str, kind: str, body: dict[str, Any], message_id: str, in_reply_to: str | None = None
) -> OutgoingRecord:
    """Return the record that posts a message from the sender `trunkline` to a mailbox of the realm `default`.

    A full mailbox takes it, too.

    Args:
        recipient: The name of the recipient. The mailbox is `default/<recipient>`.
        kind: The type of the message, such as `job.completed`.
        body: The payload of the message, which becomes JSON.
        message_id: The id of the message, see `notifications`.
        in_reply_to: The id of the message that this one answers; None if it answers none.

    Raises:
        pydantic.ValidationError: An argument breaks the rules of messages, such as a name with a space.
    """
    text = canonical(body).decode("utf-8")
    about = {"in_reply_to": in_reply_to, "unlimited": True}
    message = verified_message(message_id, SENDER, recipient, kind, text, JSON_CONTENT, **about)
    return message.record(**BY_REACTOR)


def _end_of_late_session(name: str, get: GetRow) -> list[OutgoingRecord]:
    """End a session that was made for a job which has already ended, perhaps at the same moment."""
    session = get(SessionRow, name)
    if session is None or session.for_job is None or not _is_alive(session):
        return []
    job = get(JobRow, session.for_job)
    if job is None or job.status not in JOB_TERMINAL or job.ended_by is None:
        return []
    return [_session_end(job, name, job.ended_by)]


def _is_alive(session: SessionRow | None) -> bool:
    return session is not None and session.status != TERMINATED


def stopped_with_task(task: TaskRow, participant: ParticipantRow | None) -> OutgoingRecord | None:
    """Return the record that marks the participant of an ended task as stopped.

    None means that no such record is needed: the task has not ended, or `participant` is None, belongs to
    another task or is already stopped.

    Args:
        task: The row of the task.
        participant: The row of the participant with the name of the task's agent; None if there is no row.
    """
    if task.ended_by is None or participant is None:
        return None
    if participant.task_id != task.task_id or participant.status == STOPPED:
        return None
    ce_id = derived_id(task.ended_by, AGENT_STOPPED)
    reason = f"its task is {task.status}" + (f": {task.error}" if task.error else "")
    body = AgentStopped(agent_name=task.agent_name, request_id=ce_id, reason=reason[:NOTE_LIMIT])
    return body.record(ce_id=ce_id, **BY_REACTOR)


def system_readings(reader: str, message_id: str, mailbox: str, get: GetRow) -> list[OutgoingRecord]:
    """Return the record that marks a new message to one of Trunkline's own principals as read, in a list.

    No client ever drains the mailbox of such a principal. The list is empty if the message is in another
    mailbox, was not accepted, or already has a final status.

    Args:
        reader: The principal: `hub` or `system`.
        message_id: The id of the new message.
        mailbox: The mailbox that the message was posted to, as `<realm>/<recipient>`.
        get: The look-up of rows, such as `LiveView.get`. The rows must include the new message.
    """
    posted = get(MessageRow, f"{mailbox}/{message_id}") if mailbox == f"{DEFAULT_REALM}/{reader}" else None
    if posted is None or posted.status not in MESSAGE_PENDING:
        return []
    return [MessageReading(to=reader, message_id=message_id).record(**BY_REACTOR)]


def _readings_of_delivered(record: Record, mailbox: str, get: GetRow) -> list[OutgoingRecord]:
    """Return what `system_readings` does for a message to the hub that was delayed until now."""
    if mailbox != f"{DEFAULT_REALM}/{HUB}" or record.value is None:
        return []
    try:
        due = MessageDue.model_validate(decode(record.value)[0])
    except (ValidationError, MalformedJsonError):
        return []
    return system_readings(HUB, due.message_id, mailbox, get)


def _completion(record: Record, mailbox: str, get: GetRow) -> list[OutgoingRecord]:
    """Complete the sender's task if the payload of a message says that it is done (HH-07)."""
    # Few messages contain this text, and all pass here.
    if record.value is None or TASK_COMPLETED.encode() not in record.value:
        return []
    try:
        message = Message.model_validate(decode(record.value)[0])
    except (ValidationError, MalformedJsonError):
        return []
    # The message that a replay repeats has completed the task. A message to a topic is no report to anybody.
    if message.replay_of is not None or message.topic is not None:
        return []
    text = completes_a_task(message.body)
    if text is None or message.from_task is None or not message.from_verified:
        return []
    # Only the accepted message counts, not another one under an id that is taken.
    body = get(MessageBodyRow, f"{mailbox}/{message.message_id}")
    posted = get(MessageRow, f"{mailbox}/{message.message_id}")
    if body is None or posted is None:
        return []
    accepted = (posted.sender, posted.from_task, posted.kind, body.body)
    if accepted != (message.sender, message.from_task, message.kind, message.body):
        return []
    ce_id = derived_id(message.message_id, TASK_COMPLETED)
    completion = TaskCompletion(task_id=message.from_task, request_id=ce_id, result=_shortened(text))
    return [completion.record(ce_id=ce_id, **BY_REACTOR)]


def completes_a_task(body: str) -> str | None:
    """Return the result of a task if `body`, a message's payload, reports that the sender's task is completed.

    Such a payload is a JSON object with `"event": "task.completed"`. Its field `result` is returned as text: a
    string unchanged, another value as JSON, and an empty string if the field is missing. None means that the
    payload reports no completed task.
    """
    try:
        payload = decode(body.encode("utf-8"))[0]
    except MalformedJsonError:
        return None
    if type(payload) is not dict or payload.get("event") != TASK_COMPLETED:
        return None
    result = payload.get("result")
    return "" if result is None else result_text(result)


def _shortened(text: str) -> str:
    """Cut `text` to the limit of a result; the message has the whole text."""
    raw = text.encode("utf-8")
    return text if len(raw) <= RESULT_LIMIT_BYTES else raw[:RESULT_LIMIT_BYTES].decode("utf-8", "ignore")


def derived_id(cause: str, effect: str) -> str:
    """Return the id of a derived record: a UUID that depends on the two arguments alone.

    Args:
        cause: The id of the record from which the derived record follows.
        effect: The type of the derived record. If one cause has several derived records of a type, add a text
            to the type that differs for each of them.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{cause}/{effect}"))


def _session_end(job: JobRow, session: str, cause: str) -> OutgoingRecord:
    # One end may close several sessions: the one that picked the job, and the sessions made for it.
    is_picker = session == job.session
    ce_id = derived_id(cause, SESSION_JOB_ENDED if is_picker else f"{SESSION_JOB_ENDED}/{session}")
    body = SessionJobEnded.model_validate({"session": session, "job_id": job.job_id, "outcome": job.status})
    return body.record(ce_id=ce_id, **BY_REACTOR)


class SessionsByJob:
    """The sessions that were made for each job, and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, set[str]] = {}

    def made_for(self, job_id: str) -> list[str]:
        """Return the names of the sessions that were made for a job and have not ended, in no order."""
        with self._lock:
            return list(self._names.get(job_id, ()))

    def add(self, row: Row | None) -> None:
        """Note the session of `row`, or its end, if it was made for a job. Ignore any other row and None."""
        if not isinstance(row, SessionRow) or row.for_job is None:
            return
        with self._lock:
            names = self._names.setdefault(row.for_job, set())
            if row.is_live:
                names.add(row.session)
            else:
                names.discard(row.session)
            if not names:
                del self._names[row.for_job]
