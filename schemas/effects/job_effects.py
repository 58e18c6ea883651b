"""The records that follow from those of jobs, sessions and tasks.

The principal that registered a job gets messages about it. Sessions and participants end with their job or
task.
"""

from __future__ import annotations

from typing import Any, Final

from schemas.effects.following import BY_REACTOR, Cause, Follows, derived_id
from schemas.effects.mailbox_effects import message_from_hub
from schemas.fold.stream_kind import STOPPED
from schemas.streams.agents.agent_registry import AGENT_STOPPED, AgentStopped, ParticipantRow
from schemas.streams.job.job_registry import (
    END,
    JOB_CANCELLED,
    JOB_EVENT,
    JOB_PICKED,
    JOB_TERMINAL,
    PERMISSION,
    JobRow,
    pick_id,
)
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.session.sessions import (
    SESSION_CREATED,
    SESSION_JOB_ASSIGNED,
    SESSION_JOB_ENDED,
    TERMINATED,
    SessionJobAssigned,
    SessionJobEnded,
    SessionRow,
)
from schemas.streams.task.task_registry import TASK_CANCELLED, TASK_COMPLETED, TASK_FAILED, TaskRow
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import NOTE_LIMIT
from trunkline_agent.wire.ids import is_name
from trunkline_agent.wire.job_event import PERMISSION_REQUIRED
from trunkline_agent.wire.unsafe_text import MASK, mask_event
from trunkline_agent.wire.verdicts import ACCEPTED

NEEDS_PERMISSION: Final = f"job.{PERMISSION_REQUIRED}"


def _assignment(cause: Cause) -> list[OutgoingRecord]:
    """Assign the job to the session that has picked it."""
    job = cause.get(JobRow, cause.name)
    # Only the accepted pick has the id of the job's session. A repeated pick has the same id, and so do the
    # records derived from it.
    if job is None or job.session is None or cause.id != pick_id(job.job_id, job.session):
        return []
    assigned = SessionJobAssigned(session=job.session, job_id=job.job_id)
    return [assigned.record(ce_id=derived_id(cause.id, SESSION_JOB_ASSIGNED), **BY_REACTOR)]


def _end_of_job(cause: Cause) -> list[OutgoingRecord]:
    """End the sessions of a job that has ended, and notify the principal that registered it."""
    job = cause.get(JobRow, cause.name)
    if job is None or cause.id != job.ended_by or job.status not in JOB_TERMINAL:
        return []
    picker = set() if job.session is None else {job.session}
    made_for = cause.related(SessionRow, job.job_id)
    made = {name for name in made_for if _is_alive(cause.get(SessionRow, name))}
    ended = [_session_end(job, name, cause.id) for name in sorted(picker | made)]
    if job.notify is not None and END not in job.notify:
        return ended
    body = {"job_id": job.job_id, "status": job.status, "detail": job.last_detail}
    return [*ended, *_notice(job, f"job.{job.status}", body, derived_id(cause.id, MESSAGE_POSTED))]


def _notice(job: JobRow, kind: str, body: dict[str, Any], message_id: str) -> list[OutgoingRecord]:
    """Return a message to the principal that registered a job; none if its name is no name of a mailbox."""
    recipient = job.registered_by.partition("/")[2]
    return [message_from_hub(recipient, kind, body, message_id)] if is_name(recipient) else []


def _asks_permission(cause: Cause) -> bool:
    """Return whether an event may ask for permission, and the job's registration asks for a message then."""
    if PERMISSION_REQUIRED.encode() not in (cause.record.value or b""):
        return False
    job = cause.get(JobRow, cause.name)
    return job is not None and job.notify is not None and PERMISSION in job.notify


def _permission(cause: Cause) -> list[OutgoingRecord]:
    """Notify the principal that registered a job that it needs permission."""
    job = cause.get(JobRow, cause.name)
    if job is None or cause.verdict != ACCEPTED or cause.body["event"] != PERMISSION_REQUIRED:
        return []
    event, (masked, _) = cause.body, mask_event(cause.body)
    body = {"job_id": cause.name, "seq": event["seq"], "detail": event["detail"] if masked is None else MASK}
    return _notice(job, NEEDS_PERMISSION, body, derived_id(cause.id, NEEDS_PERMISSION))


def _end_of_late_session(cause: Cause) -> list[OutgoingRecord]:
    """End a session that was made for a job which has already ended, perhaps at the same moment."""
    session = cause.get(SessionRow, cause.name)
    if session is None or session.for_job is None or not _is_alive(session):
        return []
    job = cause.get(JobRow, session.for_job)
    if job is None or job.status not in JOB_TERMINAL or job.ended_by is None:
        return []
    return [_session_end(job, cause.name, job.ended_by)]


def _is_alive(session: SessionRow | None) -> bool:
    return session is not None and session.status != TERMINATED


def _session_end(job: JobRow, session: str, cause: str) -> OutgoingRecord:
    # One end may close several sessions: the one that picked the job, and the sessions made for it.
    is_picker = session == job.session
    ce_id = derived_id(cause, SESSION_JOB_ENDED if is_picker else f"{SESSION_JOB_ENDED}/{session}")
    body = SessionJobEnded.model_validate({"session": session, "job_id": job.job_id, "outcome": job.status})
    return body.record(ce_id=ce_id, **BY_REACTOR)


def _end_of_task(cause: Cause) -> list[OutgoingRecord]:
    task = cause.get(TaskRow, cause.name)
    if task is None or task.ended_by != cause.id:
        return []
    stopped = stopped_with_task(task, cause.get(ParticipantRow, task.agent_name))
    return [] if stopped is None else [stopped]


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


JOB_FOLLOWS: Final = (
    Follows(frozenset({JOB_PICKED}), _assignment),
    Follows(frozenset({JOB_EVENT, JOB_CANCELLED}), _end_of_job),
    Follows(frozenset({JOB_EVENT}), _permission, _asks_permission),
)
SESSION_FOLLOWS: Final = (Follows(frozenset({SESSION_CREATED}), _end_of_late_session),)
TASK_FOLLOWS: Final = (Follows(frozenset({TASK_COMPLETED, TASK_FAILED, TASK_CANCELLED}), _end_of_task),)
