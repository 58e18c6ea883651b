"""The records about sessions, processes in which agents work on jobs (JE-14): their bodies."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from schemas.fold.life_cycles import RUNNING, STOPPED
from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import JobId, Name, Note, WireBody, models_of

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
STOP_MODES: Final = (STOP, HARD, SOFT)

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
