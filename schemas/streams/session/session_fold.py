"""The fold of the stream `session/<name>`: a process in which an agent works on jobs (JE-14).

The state is the entry `session`, and `requests/...` with older requests (`schemas.fold.memories`). It remains
after the session is terminated, so its name is not used again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.life_cycles import RUNNING, STOPPED, wrong_state
from schemas.fold.memories import RequestMemory
from schemas.fold.request_fold import RequestFold, Requests
from schemas.fold.settled import Outcome, changed, rejected
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
from trunkline_agent.wire.verdicts import SEQ_CONFLICT

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


_row: Final = row_maker(SessionRow, SessionEntry)


def _created(given: FoldInput, known: SessionEntry | None) -> SessionEntry | Outcome:
    if known is not None:
        return rejected(SEQ_CONFLICT, "a session with this name exists already", known.status)
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


def _job_assigned(given: FoldInput, known: SessionEntry | None) -> SessionEntry | Outcome:
    # A session that no record created may pick a job. Its first pick creates it.
    session = known or _created(given, None)
    if isinstance(session, SessionEntry):
        if session.status != RUNNING:
            return wrong_state(SESSION_TRANSITIONS, session.status, "session")
        session.job_id = given.body["job_id"]
    return session


def _job_ended(given: FoldInput, session: SessionEntry) -> SessionEntry:
    job_id = given.body["job_id"]
    session.jobs_ended += 1
    if session.job_id == job_id:
        session.job_id = None
    # An archived session was released, so it remains even if it was created for this job.
    ends = session.status != ARCHIVED and TERMINATED in SESSION_TRANSITIONS[session.status]
    if session.for_job == job_id and ends:
        _end(given, session, TERMINATED, f"job {given.body['outcome']}")
    return session


def _stopped(given: FoldInput, session: SessionEntry) -> SessionEntry | Outcome:
    wanted = _STATE_BY_MODE[given.body.get("mode", STOP)]
    if wanted not in SESSION_TRANSITIONS[session.status]:
        return wrong_state(SESSION_TRANSITIONS, session.status, "session")
    _end(given, session, wanted, given.body.get("reason") or None)
    session.capture_id = given.body.get("capture_id")
    return session


def _resumed(given: FoldInput, session: SessionEntry) -> SessionEntry:
    body = given.body
    session.status, session.stopped_at, session.reason = RUNNING, None, None
    session.host, session.handle = body.get("host") or session.host, body.get("handle") or session.handle
    return session


def _end(given: FoldInput, session: SessionEntry, status: str, reason: str | None) -> None:
    session.status = status
    session.stopped_at = given.now_us
    session.reason = reason


_FOLD: Final = RequestFold(
    StructEntries("session", SessionEntry),
    {
        SESSION_CREATED: _created,
        SESSION_JOB_ASSIGNED: _job_assigned,
        SESSION_JOB_ENDED: _job_ended,
        SESSION_STOPPED: _stopped,
        SESSION_RESUMED: _resumed,
    },
    begins=(SESSION_CREATED, SESSION_JOB_ASSIGNED),
    unknown="no session with this name",
    noun="session",
    transitions=SESSION_TRANSITIONS,
    leads_to={SESSION_RESUMED: RUNNING},
    changes=lambda given, session: (changed(_row(session, session=given.name)),),
    requests=Requests(is_inside=True),
)
SESSION_KIND: Final = StreamKind(
    name=SESSION,
    models=SESSION_MODELS,
    settle=_FOLD.settle,
    row_of_each_stream=(SessionRow,),
    rows=(SessionRow,),
    named_by="session",
)
