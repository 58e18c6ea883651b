"""The request and answer bodies of sessions."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from connectors.hub.serving.models import (
    LIST_LIMIT,
    AnswerBody,
    JobId,
    ListLimit,
    NamedThing,
    QueryFilter,
    RequestBody,
    row_answer,
)
from schemas.streams.session.session_registry import STOP, SessionRow
from schemas.wire.wire_body import Note

Handle = Annotated[str, Field(max_length=256, pattern=r"^(tmux|process)/[A-Za-z0-9._/-]+$")]
"""The name of a session's process on its host."""


class SessionRequest(RequestBody):
    """A session to create."""

    session: NamedThing
    """Name of the session."""
    description: Note = ""
    """Remark about the session."""
    host: NamedThing | None = None
    """Host on which the session runs. Null: unknown."""
    handle: Handle | None = None
    """Process on that host: `tmux/<socket>/<name>` or `process/<pid>/<start time>`. Null: unknown."""
    for_job: JobId | None = None
    """Job for which the session is created and with which it ends. Null: none."""


class StopRequest(RequestBody):
    """The way a session ends, and the reason."""

    mode: Literal["stop", "hard", "soft"] = STOP
    """State after it: `stopped` (`stop`), `terminated` for good (`hard`) or `archived` (`soft`)."""
    reason: Note = ""
    """Reason for the stop."""
    capture_id: NamedThing | None = None
    """Id of the terminal's content that was stored at the stop. Null: none was stored."""
    graceful: bool = False
    """True if the process has some seconds to end by itself."""


class ResumeRequest(RequestBody):
    """The place where a session runs again."""

    host: NamedThing | None = None
    """Host on which the session runs. Null: unknown."""
    handle: Handle | None = None
    """Process on that host: `tmux/<socket>/<name>` or `process/<pid>/<start time>`. Null: unknown."""


class SessionFilter(QueryFilter):
    """The sessions to list, newest first."""

    state: Literal["running", "stopped", "archived", "terminated"] | None = None
    """State of the sessions. Without it: any."""
    limit: ListLimit = LIST_LIMIT
    """Largest number of sessions in the answer."""


SessionAnswer: Final = row_answer("SessionAnswer", SessionRow)


class SessionsAnswer(AnswerBody):
    """The newest matching sessions, and the number of all matching sessions."""

    sessions: list[SessionAnswer]  # type: ignore[valid-type]
    """Sessions, newest first."""
    total: int
    """Number of all matching sessions."""
