"""The fold of the stream `session/<name>`: a process in which an agent works on jobs (JE-14).

The state is the entry `session`, and `requests/...` with older requests (`schemas.fold.memories`). It remains
after the session is terminated, so its name is not used again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.life_cycles import RUNNING, STOPPED, wrong_state
from schemas.fold.memories import RequestChunk, RequestMemory
from schemas.fold.settled import Outcome, accepted, changed, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.fold.view_rows import row_maker
from schemas.streams.session.session_registry import (
    ARCHIVED,
    HARD,
    SESSION_CREATED,
    SESSION_JOB_ASSIGNED,
    SESSION_JOB_ENDED,
    SESSION_MODELS,
    SESSION_RESUMED,
    SESSION_STOPPED,
    SESSION_TRANSITIONS,
    SOFT,
    STOP,
    TERMINATED,
    SessionRow,
)
from trunkline_agent.wire.ids import SESSION
from trunkline_agent.wire.verdicts import SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
_STATE_BY_MODE: Final = {STOP: STOPPED, HARD: TERMINATED, SOFT: ARCHIVED}


class SessionEntry(msgspec.Struct, array_like=True, gc=False):
    """The stream state of a session: the fields of its row, and a memory of accepted requests.

    Times are in microseconds since 1970 UTC.
    """

    version: int
    status: str
    created_by: str
    created_at: int
    requests: RequestMemory
    description: str = ""
    host: str | None = None
    handle: str | None = None
    for_job: str | None = None
    job_id: str | None = None
    jobs_ended: int = 0
    stopped_at: int | None = None
    reason: str | None = None
    capture_id: str | None = None


_SESSION: Final = StructEntries("session", SessionEntry)
_REQUESTS: Final = StructEntries("requests/", RequestChunk)
_row: Final = row_maker(SessionRow, SessionEntry)


def settle_session(given: FoldInput) -> Outcome:
    """Settle a record of `session/<name>`: update the stream state, return verdict and changed rows.

    The record creates, stops or resumes the session, assigns a job to it, or reports that a job of it ended.
    `schemas.streams.fold.settle` calls this function with a checked body. The changes of the stream state,
    `given.entries`, count only if the record is accepted.
    """
    session = _SESSION.read(given.entries)
    if session is None:
        # A session that no record created may pick a job. Its first pick creates it.
        if given.type not in (SESSION_CREATED, SESSION_JOB_ASSIGNED):
            return rejected(UNKNOWN_STREAM, "no session with this name")
        session = _created(given)
    else:
        repeated = session.requests.repeated(given, _REQUESTS, session.status)
        if repeated is not None:
            return repeated
        if given.type == SESSION_CREATED:
            return rejected(SEQ_CONFLICT, "a session with this name exists already", session.status)
    refusal = _apply(given, session)
    if refusal is not None:
        return refusal
    session.requests.add(given, _REQUESTS)
    _SESSION.write(given.entries, session)
    return accepted(session.status, (changed(_row(session, session=given.name)),))


def _created(given: FoldInput) -> SessionEntry:
    body = given.body
    return SessionEntry(
        version=ENTRY_VERSION,
        status=RUNNING,
        created_by=given.sender,
        created_at=given.now_us,
        requests=RequestMemory(),
        description=body.get("description", ""),
        host=body.get("host"),
        handle=body.get("handle"),
        for_job=body.get("for_job"),
    )


def _apply(given: FoldInput, session: SessionEntry) -> Outcome | None:
    """Change `session`, or return the rejection."""
    status, kind, body = session.status, given.type, given.body
    if kind == SESSION_JOB_ENDED:
        session.jobs_ended += 1
        if session.job_id == body["job_id"]:
            session.job_id = None
        # An archived session was released, so it remains even if it was created for this job.
        ends = status != ARCHIVED and TERMINATED in SESSION_TRANSITIONS[status]
        if session.for_job == body["job_id"] and ends:
            _end(given, session, TERMINATED, f"job {body['outcome']}")
        return None
    if kind == SESSION_CREATED:
        return None
    if kind == SESSION_JOB_ASSIGNED:
        if status != RUNNING:
            return wrong_state(SESSION_TRANSITIONS, status, "session")
        session.job_id = body["job_id"]
        return None
    wanted = _STATE_BY_MODE[body.get("mode", STOP)] if kind == SESSION_STOPPED else RUNNING
    if wanted not in SESSION_TRANSITIONS[status]:
        return wrong_state(SESSION_TRANSITIONS, status, "session")
    if kind == SESSION_RESUMED:
        session.status, session.stopped_at, session.reason = wanted, None, None
        session.host, session.handle = body.get("host") or session.host, body.get("handle") or session.handle
        return None
    _end(given, session, wanted, body.get("reason") or None)
    session.capture_id = body.get("capture_id")
    return None


def _end(given: FoldInput, session: SessionEntry, status: str, reason: str | None) -> None:
    session.status = status
    session.stopped_at = given.now_us
    session.reason = reason


SESSION_KIND: Final = StreamKind(
    name=SESSION,
    models=SESSION_MODELS,
    settle=settle_session,
    row_of_each_stream=(SessionRow,),
    rows=(SessionRow,),
    named_by="session",
)
