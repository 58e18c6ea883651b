"""The operations of sessions (JE-14): create, stop, resume, show, list; and their bodies."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Path
from pydantic import Field

from connectors.hub.engine.family import Family, LongAnswer, page_by_age
from connectors.hub.engine.operation import Asked
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import existing, row_as_json
from connectors.hub.serving.models import (
    LIST_LIMIT,
    NAMED,
    AnswerBody,
    JobId,
    ListLimit,
    NamedThing,
    QueryFilter,
    RequestBody,
    row_answer,
)
from connectors.hub.serving.policy import Action
from connectors.operations.rules.owners import owner_in
from schemas.streams.session.sessions import (
    SESSION_STATES,
    STOP,
    SessionCreation,
    SessionResumption,
    SessionRow,
    SessionStop,
)
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


SessionPath = Annotated[str, Path(**NAMED, description="Name of the session.")]


def _shown(hub: Hub, name: str) -> dict[str, Any]:
    return row_as_json(existing(hub.live_view.get(SessionRow, name), "no session with this name"))


_creator: Final = owner_in(SessionRow, "name", lambda row: row.created_by)
SESSIONS: Final = Family("/api/hub/sessions", _shown, "session", _creator)


@SESSIONS.post("", Action.SESSION_CREATE, SessionAnswer, STATUS=201)
def create_session(hub: Hub, asked: Asked, body: SessionRequest) -> SessionCreation:
    """Record that a session exists and runs from now on. The gateway does not start a process.

    The answer is the session, or 409 when a session with this name exists already.
    """
    return SessionCreation(request_id=asked.request_id, **body.model_dump())


@SESSIONS.post("/{name}/stop", Action.SESSION_STOP, SessionAnswer)
def stop_session(hub: Hub, asked: Asked, name: SessionPath, body: StopRequest | None = None) -> SessionStop:
    """Record that a session was stopped (mode `stop`), removed (`hard`) or released (`soft`).

    The gateway does not end the session's process. The answer is 404 for an unknown session, and 409 when
    its state does not allow the change.
    """
    return SessionStop(session=name, request_id=asked.request_id, **(body or StopRequest()).model_dump())


@SESSIONS.post("/{name}/resume", Action.SESSION_RESUME, SessionAnswer)
def resume_session(
    hub: Hub, asked: Asked, name: SessionPath, body: ResumeRequest | None = None
) -> SessionResumption:
    """Record that a stopped session runs again, perhaps on another host.

    The answer is 404 for an unknown session, and 409 for one that runs or was removed (mode `hard`).
    """
    fields = (body or ResumeRequest()).model_dump()
    return SessionResumption(session=name, request_id=asked.request_id, **fields)


@SESSIONS.get("", Action.SESSION_READ, SessionsAnswer, COMMAND="sessions list")
def list_sessions(hub: Hub, asked: Asked, wanted: SessionFilter) -> LongAnswer:
    """List sessions, newest first. Without the filter `state`, sessions in all states are listed."""
    lists = SESSION_STATES if wanted.state is None else (wanted.state,)
    return page_by_age(hub, "sessions", hub.lists.sessions, lists, wanted.limit, is_bounded=False)


@SESSIONS.get("/{name}", Action.SESSION_READ, SessionAnswer)
def show_session(hub: Hub, asked: Asked, name: SessionPath) -> dict[str, Any]:
    """Show the session with this name, or answer 404."""
    return _shown(hub, name)
