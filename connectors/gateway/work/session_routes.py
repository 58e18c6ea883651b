"""The HTTP routes for sessions (JE-14): create, stop, resume, show, list."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import Path, Query, Response

from connectors.gateway.rules.owners import owner_in
from connectors.gateway.rules.session_models import (
    ResumeRequest,
    SessionAnswer,
    SessionFilter,
    SessionRequest,
    SessionsAnswer,
    StopRequest,
)
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.ordered_rows import OrderedRows
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import existing, json_answer, row_as_json
from connectors.gateway.web.idempotency import Write, WriteRequest
from connectors.gateway.web.models import NAME_PATTERN
from connectors.gateway.web.policy import Action
from schemas.streams.session.session_registry import (
    SESSION_STATES,
    SessionCreation,
    SessionResumption,
    SessionRow,
    SessionStop,
    session_record,
)
from trunkline_agent.wire.ids import NAME_LIMIT

SESSIONS: Final = "/api/hub/sessions"
SessionPath = Annotated[
    str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT, description="Name of the session.")
]


def add_session_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that create, stop, resume, show and list sessions.

    Called once, when the gateway starts. The paths begin with `/api/hub/sessions`. The routes read from `hub`
    and append records through it.
    """
    _add_changes(routes, hub)
    _add_reads(routes, hub)


def _add_changes(routes: Routes, hub: Hub) -> None:
    creator = owner_in(hub, SessionRow, "name", lambda row: row.created_by)

    async def change(
        write: Write, body: SessionCreation | SessionStop | SessionResumption, status: int = 200
    ) -> Response:
        settled = await hub.appender.settle_accepted(session_record(body, **write.origin))
        row = hub.live_view.get(SessionRow, body.session)
        return json_answer(None if row is None else row_as_json(row), status, settled.verdict)

    @routes.post(SESSIONS, Action.SESSION_CREATE, SessionAnswer, status_code=201)
    async def create_session(write: WriteRequest, body: SessionRequest) -> Response:
        """Record that a session exists and runs from now on. The gateway does not start a process.

        The answer is the session, or 409 when a session with this name exists already.
        """
        return await change(write, SessionCreation(request_id=write.request_id, **body.model_dump()), 201)

    @routes.post(f"{SESSIONS}/{{name}}/stop", Action.SESSION_STOP, SessionAnswer, creator)
    async def stop_session(write: WriteRequest, name: SessionPath, body: StopRequest | None = None) -> Response:
        """Record that a session was stopped (mode `stop`), removed (`hard`) or released (`soft`).

        The gateway does not end the session's process. The answer is 404 for an unknown session, and 409 when
        its state does not allow the change.
        """
        fields = (body or StopRequest()).model_dump()
        return await change(write, SessionStop(session=name, request_id=write.request_id, **fields))

    @routes.post(f"{SESSIONS}/{{name}}/resume", Action.SESSION_RESUME, SessionAnswer, creator)
    async def resume_session(
        write: WriteRequest, name: SessionPath, body: ResumeRequest | None = None
    ) -> Response:
        """Record that a stopped session runs again, perhaps on another host.

        The answer is 404 for an unknown session, and 409 for one that runs or was removed (mode `hard`).
        """
        fields = (body or ResumeRequest()).model_dump()
        return await change(write, SessionResumption(session=name, request_id=write.request_id, **fields))


def _add_reads(routes: Routes, hub: Hub) -> None:
    @routes.get(SESSIONS, Action.SESSION_READ, SessionsAnswer)
    async def list_sessions(wanted: Annotated[SessionFilter, Query()]) -> Response:
        """List sessions, newest first. Without the filter `state`, sessions in all states are listed."""
        return json_answer(await asyncio.to_thread(_listed, hub.lists.sessions, wanted))

    @routes.get(f"{SESSIONS}/{{name}}", Action.SESSION_READ, SessionAnswer)
    async def show_session(name: SessionPath) -> Response:
        """Show the session with this name, or answer 404."""
        row = existing(hub.live_view.get(SessionRow, name), "no session with this name")
        return json_answer(row_as_json(row))


def _listed(sessions: OrderedRows[SessionRow], wanted: SessionFilter) -> dict[str, Any]:
    lists = SESSION_STATES if wanted.state is None else (wanted.state,)
    rows = sessions.newest(lists, wanted.limit)
    return {"sessions": [row_as_json(row) for row in rows], "total": sessions.count(lists)}
