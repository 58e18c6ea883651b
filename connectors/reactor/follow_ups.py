"""What follows from a settled record in another stream, told from the record and the rows alone.

Derived twice, at any later time and by anybody, a follow-up is the same record with the same id: so it counts
once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Final

from pydantic import ValidationError

from schemas.fold.life_cycles import JOB_TERMINAL, STOPPED, TERMINATED
from schemas.fold.view_rows import (
    MAILBOX_VIEW,
    MESSAGE_BODIES,
    REGISTRY_JOBS,
    REGISTRY_PARTICIPANTS,
    REGISTRY_SESSIONS,
    REGISTRY_TASKS,
    JobRow,
    MessageBodyRow,
    MessageRow,
    ParticipantRow,
    Row,
    SessionRow,
    TaskRow,
)
from schemas.streams.agents.participants import AgentStopped, participant_record
from schemas.streams.job.job_registry import END, pick_id
from schemas.streams.mailboxes.mailbox_requests import read_record
from schemas.streams.principal.principals import HUB, REACTOR, SENDER
from schemas.streams.session.session_registry import SessionJobAssigned, SessionJobEnded, session_record
from schemas.streams.task.task_registry import RESULT_LIMIT_BYTES, TaskCompletion, result_text, task_record
from schemas.wire.ids import JOB, MAILBOX, SESSION, TASK, is_name, parse_stream_key
from schemas.wire.message import DEFAULT_REALM, MESSAGE_PENDING, Message, posting_record
from schemas.wire.record import (
    AGENT_STOPPED,
    JOB_CANCELLED,
    JOB_EVENT,
    JOB_PICKED,
    MESSAGE_POSTED,
    SESSION_CREATED,
    SESSION_JOB_ASSIGNED,
    SESSION_JOB_ENDED,
    TASK_COMPLETED,
    BadEnvelopeError,
    OutgoingRecord,
    Record,
    read_envelope,
)
from schemas.wire.strict_json import MalformedJsonError, canonical, decode
from schemas.wire.wire_body import NOTE_LIMIT

DOOR: Final = "reactor"
_NAMESPACE: Final = uuid.UUID("5f0c86f1-6c6f-4bb0-9f5e-0d6f3a1c7d52")
_CAUSES: Final = frozenset({JOB_PICKED, JOB_EVENT, JOB_CANCELLED})

Rows = Callable[[str, str], Row | None]
"""`row(view, key)`, as of the record or of any time after it."""

MadeFor = Callable[[str], Iterable[str]]
"""`made_for(job_id)`: the names of the sessions that were made for the job, also of those that have ended."""


def follow_ups(record: Record, row: Rows, made_for: MadeFor) -> list[OutgoingRecord]:
    """Return the records that follow from `record`, which is settled; most often none."""
    stream = parse_stream_key(record.key)
    if stream is None or stream[0] not in (JOB, MAILBOX, SESSION, TASK):
        return []
    try:
        envelope = read_envelope(record)
    except BadEnvelopeError:
        return []
    if envelope.type == MESSAGE_POSTED:
        return [*_completion(record, stream[1], row), *_reading(envelope.ce_id, stream[1], row)]
    if stream[0] == TASK:
        task = row(REGISTRY_TASKS, stream[1])
        if not isinstance(task, TaskRow) or task.ended_by != envelope.ce_id:
            return []
        stopped = stopped_with_task(task, row(REGISTRY_PARTICIPANTS, task.agent_name))
        return [] if stopped is None else [stopped]
    if envelope.type == SESSION_CREATED:
        return _ended_before(stream[1], row)
    if envelope.type not in _CAUSES:
        return []
    job = row(REGISTRY_JOBS, stream[1])
    if not isinstance(job, JobRow):
        return []
    if envelope.type == JOB_PICKED:
        # Only the pick that counts has the id of its session's; the same again has the same id, and so has
        # what follows from it.
        if job.session is None or envelope.ce_id != pick_id(job.job_id, job.session):
            return []
        return [_assigned(job, job.session, envelope.ce_id)]
    if envelope.ce_id != job.ended_by or job.status not in JOB_TERMINAL:
        return []
    picker = set() if job.session is None else {job.session}
    made = {name for name in made_for(job.job_id) if _is_alive(row(REGISTRY_SESSIONS, name))}
    ended = [_ended(job, name, envelope.ce_id) for name in sorted(picker | made)]
    return [*ended, *_told(job, envelope.ce_id)]


def _ended_before(name: str, row: Rows) -> list[OutgoingRecord]:
    """End a session that was made for a job which has ended already, perhaps at the same moment."""
    session = row(REGISTRY_SESSIONS, name)
    if not isinstance(session, SessionRow) or session.for_job is None or not _is_alive(session):
        return []
    job = row(REGISTRY_JOBS, session.for_job)
    if not isinstance(job, JobRow) or job.status not in JOB_TERMINAL or job.ended_by is None:
        return []
    return [_ended(job, name, job.ended_by)]


def _is_alive(session: Row | None) -> bool:
    return isinstance(session, SessionRow) and session.status != TERMINATED


def stopped_with_task(task: TaskRow, participant: Row | None) -> OutgoingRecord | None:
    """The end of the participant that was spawned for a task that has ended; None when there is none."""
    if task.ended_by is None or not isinstance(participant, ParticipantRow):
        return None
    if participant.task_id != task.task_id or participant.status == STOPPED:
        return None
    ce_id = follow_up_id(task.ended_by, AGENT_STOPPED)
    reason = f"its task is {task.status}" + (f": {task.error}" if task.error else "")
    body = AgentStopped(agent_name=task.agent_name, request_id=ce_id, reason=reason[:NOTE_LIMIT])
    return participant_record(body, door=DOOR, principal=REACTOR, ce_id=ce_id)


def _reading(message_id: str, mailbox: str, row: Rows) -> list[OutgoingRecord]:
    """The hub reads what is sent to it; nobody else ever drains its mailbox."""
    if mailbox != f"{DEFAULT_REALM}/{HUB}":
        return []
    posted = row(MAILBOX_VIEW, f"{mailbox}/{message_id}")
    if not isinstance(posted, MessageRow) or posted.status not in MESSAGE_PENDING:
        return []
    return [read_record(DEFAULT_REALM, HUB, message_id, door=DOOR, principal=REACTOR)]


def _completion(record: Record, mailbox: str, row: Rows) -> list[OutgoingRecord]:
    """A message whose payload says that the sender's task is done completes it (HH-07)."""
    # Few messages say so, and all pass here.
    if record.value is None or TASK_COMPLETED.encode() not in record.value:
        return []
    try:
        message = Message.model_validate(decode(record.value)[0])
    except (ValidationError, MalformedJsonError):
        return []
    text = completes_a_task(message.body)
    if text is None or message.from_task is None:
        return []
    # Only what was accepted counts, not another message under an id that is taken.
    body = row(MESSAGE_BODIES, f"{mailbox}/{message.message_id}")
    posted = row(MAILBOX_VIEW, f"{mailbox}/{message.message_id}")
    if not message.from_verified or not isinstance(body, MessageBodyRow) or not isinstance(posted, MessageRow):
        return []
    accepted = (posted.sender, posted.from_task, posted.kind, body.body)
    if accepted != (message.sender, message.from_task, message.kind, message.body):
        return []
    ce_id = follow_up_id(message.message_id, TASK_COMPLETED)
    completion = TaskCompletion(task_id=message.from_task, request_id=ce_id, result=_shortened(text))
    return [task_record(completion, door=DOOR, principal=REACTOR, ce_id=ce_id)]


def completes_a_task(body: str) -> str | None:
    """Return the result of the sender's task that a body reports, as text (`result_text`); None when the body
    does not say that the task is done.
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
    """At most as much as a result may hold; the whole of it is in the message."""
    raw = text.encode("utf-8")
    return text if len(raw) <= RESULT_LIMIT_BYTES else raw[:RESULT_LIMIT_BYTES].decode("utf-8", "ignore")


def follow_up_id(cause: str, effect: str) -> str:
    """The id of one effect of the record with the CloudEvents id `cause`."""
    return str(uuid.uuid5(_NAMESPACE, f"{cause}/{effect}"))


def _assigned(job: JobRow, session: str, cause: str) -> OutgoingRecord:
    ce_id = follow_up_id(cause, SESSION_JOB_ASSIGNED)
    body = SessionJobAssigned(session=session, job_id=job.job_id)
    return session_record(body, door=DOOR, principal=REACTOR, ce_id=ce_id)


def _ended(job: JobRow, session: str, cause: str) -> OutgoingRecord:
    # One end may close several sessions: the one that picked the job, and those made for it.
    is_picker = session == job.session
    ce_id = follow_up_id(cause, SESSION_JOB_ENDED if is_picker else f"{SESSION_JOB_ENDED}/{session}")
    body = SessionJobEnded.model_validate({"session": session, "job_id": job.job_id, "outcome": job.status})
    return session_record(body, door=DOOR, principal=REACTOR, ce_id=ce_id)


def _told(job: JobRow, cause: str) -> list[OutgoingRecord]:
    """The message to who registered the job, who may have said what to be told of."""
    recipient = job.registered_by.partition("/")[2]
    if not is_name(recipient) or (job.notify is not None and END not in job.notify):
        return []
    body = {"job_id": job.job_id, "status": job.status, "detail": job.last_detail}
    message = Message.model_validate(
        {
            "message_id": follow_up_id(cause, MESSAGE_POSTED),
            "from": SENDER,
            "from_verified": True,
            "to": recipient,
            "kind": f"job.{job.status}",
            "body": canonical(body).decode("utf-8"),
        }
    )
    return [posting_record(message, door=DOOR, principal=REACTOR)]
