"""The stream `session/<name>`: a process in which an agent works on jobs (JE-14). Its records, row and fold.

The state is the entry `session`, and `requests/...` with older requests (`schemas.fold.memories`). It remains
after the session is terminated, so its name is not used again.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

import msgspec
from pydantic import Field

from schemas.fold.entries import StructEntries
from schemas.fold.memories import RequestMemory
from schemas.fold.request_fold import RequestFold, Requests
from schemas.fold.settled import Outcome, changed, rejected
from schemas.fold.stream_kind import RUNNING, STOPPED, FoldInput, StreamKind, wrong_state
from schemas.fold.view_rows import Moment, Row, row_maker
from schemas.wire.wire_body import JobId, Name, Note, WireBody, models_of
from trunkline_agent.wire.ids import SESSION
from trunkline_agent.wire.verdicts import SEQ_CONFLICT

SESSION_CREATED: Final = "session.created"
SESSION_STOPPED: Final = "session.stopped"
SESSION_RESUMED: Final = "session.resumed"
SESSION_JOB_ASSIGNED: Final = "session.job_assigned"
SESSION_JOB_ENDED: Final = "session.job_ended"
REGISTRY_SESSIONS: Final = "registry_sessions"

ARCHIVED: Final = "archived"
TERMINATED: Final = "terminated"
SESSION_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    RUNNING: frozenset({STOPPED, ARCHIVED, TERMINATED}),
    STOPPED: frozenset({RUNNING, ARCHIVED, TERMINATED}),
    ARCHIVED: frozenset({RUNNING, TERMINATED}),
    TERMINATED: frozenset(),
}
SESSION_STATES: Final = tuple(SESSION_TRANSITIONS)

# The modes of a stop (JE-14): STOP leads to `stopped`, HARD to `terminated`, SOFT to `archived`.
STOP: Final = "stop"
HARD: Final = "hard"
SOFT: Final = "soft"

Handle = Annotated[str, Field(max_length=256, pattern=r"^(tmux|process)/[A-Za-z0-9._/-]+\z")]


class SessionRow(Row, frozen=True, gc=False):
    """A row of `registry_sessions`: a process in which an agent works on jobs, one after the other."""

    VIEW: ClassVar = REGISTRY_SESSIONS
    KEY: ClassVar = ("session",)
    ORDER: ClassVar = "created_at"

    session: str
    """Name of the session."""
    status: str
    """`running`, `stopped`, `archived` or `terminated`."""
    description: str
    """Description by the principal that created the session."""
    host: str | None
    """Host on which the session runs. Null if it is unknown."""
    handle: str | None
    """Process on that host: `tmux/<socket>/<name>` or `process/<pid>/<start time>`. Null if it is unknown."""
    for_job: str | None
    """Job for which the session was created and with which it ends. Null: none."""
    job_id: str | None
    """Job that the session works on now. Null: none."""
    jobs_ended: int
    """Number of jobs that ended in this session."""
    created_by: str
    """Principal that created the session."""
    created_at: Moment
    """Time of the creation."""
    stopped_at: Moment | None
    """Time at which the session was stopped, archived or terminated. Null: it is running."""
    reason: str | None
    """Reason for the stop. Null: none was given."""
    capture_id: str | None
    """Id of the terminal's content that was stored at the stop. Null: none was stored."""

    @property
    def is_live(self) -> bool:
        """True if the session is not terminated."""
        return self.status != TERMINATED

    @property
    def lists(self) -> tuple[str, ...]:
        """The list of the row's status."""
        return (self.status,)


class _SessionBody(WireBody):
    STREAM: ClassVar = "session/{session}"
    IDENTITY: ClassVar[tuple[str, ...]] = ("{origin}", "{session}", "{request_id}")

    session: Name


class SessionCreation(_SessionBody):
    """Body of `session.created`: a new session runs.

    Attributes:
        description: a remark of the principal that created the session.
        host: the host on which the session runs, or `None` if it is unknown.
        handle: the process on that host, as `tmux/<socket>/<name>` or `process/<pid>/<start time>`. `None` if
            it is unknown.
        for_job: the job for which the session was created and with which it ends. `None` means none.
    """

    TYPE: ClassVar = SESSION_CREATED

    request_id: Name
    description: Note = ""
    host: Name | None = None
    handle: Handle | None = None
    for_job: JobId | None = None


class SessionStop(_SessionBody):
    """Body of `session.stopped`: the session takes no more jobs.

    Attributes:
        mode: `stop` leads to the status `stopped`, `hard` to `terminated`, `soft` to `archived`. Only `soft`
            leaves the session's process running.
        capture_id: the id of the terminal's content that was stored before, or `None`.
        graceful: whether the process has some seconds to end by itself.
    """

    TYPE: ClassVar = SESSION_STOPPED

    request_id: Name
    mode: Literal["stop", "hard", "soft"] = STOP
    reason: Note = ""
    capture_id: Name | None = None
    graceful: bool = False


class SessionResumption(_SessionBody):
    """Body of `session.resumed`: a stopped or archived session runs again, perhaps in another process.

    `host` is the host of the process. `handle` is the process on that host, as `tmux/<socket>/<name>` or
    `process/<pid>/<start time>`. `None` leaves the known value unchanged.
    """

    TYPE: ClassVar = SESSION_RESUMED

    request_id: Name
    host: Name | None = None
    handle: Handle | None = None


class SessionJobAssigned(_SessionBody):
    """Body of `session.job_assigned`: the session has picked the job and works on it now."""

    TYPE: ClassVar = SESSION_JOB_ASSIGNED
    IDENTITY: ClassVar = ("{origin}", "{content}")

    job_id: JobId


class SessionJobEnded(_SessionBody):
    """Body of `session.job_ended`: a job that the session worked on ended, with the final status `outcome`."""

    TYPE: ClassVar = SESSION_JOB_ENDED
    IDENTITY: ClassVar = ("{origin}", "{content}")

    job_id: JobId
    outcome: Literal["completed", "error", "cancelled"]


SESSION_MODELS: Final = models_of(
    SessionCreation, SessionStop, SessionResumption, SessionJobAssigned, SessionJobEnded
)


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
