"""The sessions API (JE-14): create, stop, resume, show, list."""

from __future__ import annotations

import asyncio
import heapq
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query, Request, Response

from connectors.gateway.rules.owners import owner_of_session
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import asks_for
from connectors.gateway.web.answers import json_answer, not_found, refuse_rejected, row_as_json
from connectors.gateway.web.idempotency import IdempotencyKey, request_uuid
from connectors.gateway.web.models import (
    ERRORS,
    NAME_PATTERN,
    ResumeRequest,
    SessionAnswer,
    SessionFilter,
    SessionRequest,
    SessionsAnswer,
    StopRequest,
)
from connectors.gateway.web.policy import Action
from connectors.gateway.web.refusals import DOOR
from connectors.live.live_view import LiveView
from schemas.fold.view_rows import REGISTRY_SESSIONS, SessionRow
from schemas.streams.session.session_registry import (
    SessionCreation,
    SessionResumption,
    SessionStop,
    session_record,
)
from schemas.wire.ids import NAME_LIMIT

SESSIONS: Final = "/api/hub/sessions"
SessionPath = Annotated[str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT)]
_Body = SessionCreation | SessionStop | SessionResumption


def add_session_routes(app: FastAPI, hub: Hub) -> None:
    """Add the routes under `/api/hub/sessions`."""
    _add_changes(app, hub)
    _add_reads(app, hub)


def _add_changes(app: FastAPI, hub: Hub) -> None:
    async def change(request: Request, body: _Body, status: int = 200) -> Response:
        principal = request.state.caller.principal
        record = session_record(body, door=DOOR, principal=principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        row = hub.live_view.row(REGISTRY_SESSIONS, body.session)
        return json_answer(None if row is None else row_as_json(row), status, settled.verdict)

    def made(request: Request, key: str | None) -> str:
        return str(request_uuid(request.state.caller.principal, key))

    @app.post(SESSIONS, status_code=201, response_model=SessionAnswer, responses=ERRORS)
    @asks_for(Action.SESSION_CREATE)
    async def create_session(request: Request, body: SessionRequest, key: IdempotencyKey = None) -> Response:
        """Note a session that exists from now on."""
        creation = SessionCreation(request_id=made(request, key), **body.model_dump())
        return await change(request, creation, 201)

    @app.post(f"{SESSIONS}/{{name}}/stop", response_model=SessionAnswer, responses=ERRORS)
    @asks_for(Action.SESSION_STOP, owner_of_session(hub))
    async def stop_session(
        request: Request, name: SessionPath, body: StopRequest | None = None, key: IdempotencyKey = None
    ) -> Response:
        """Note that a session is stopped (`stop`), gone (`hard`) or released (`soft`)."""
        fields = (body or StopRequest()).model_dump()
        return await change(request, SessionStop(session=name, request_id=made(request, key), **fields))

    @app.post(f"{SESSIONS}/{{name}}/resume", response_model=SessionAnswer, responses=ERRORS)
    @asks_for(Action.SESSION_RESUME, owner_of_session(hub))
    async def resume_session(
        request: Request, name: SessionPath, body: ResumeRequest | None = None, key: IdempotencyKey = None
    ) -> Response:
        """Note that a session runs again."""
        fields = (body or ResumeRequest()).model_dump()
        return await change(request, SessionResumption(session=name, request_id=made(request, key), **fields))


def _add_reads(app: FastAPI, hub: Hub) -> None:
    @app.get(SESSIONS, response_model=SessionsAnswer, responses=ERRORS)
    @asks_for(Action.SESSION_READ)
    async def list_sessions(wanted: Annotated[SessionFilter, Query()]) -> Response:
        """List sessions, newest first."""
        return json_answer(await asyncio.to_thread(_listed, hub.live_view, wanted))

    @app.get(f"{SESSIONS}/{{name}}", response_model=SessionAnswer, responses=ERRORS)
    @asks_for(Action.SESSION_READ)
    async def show_session(name: SessionPath) -> Response:
        """Show one session."""
        row = hub.live_view.row(REGISTRY_SESSIONS, name)
        if row is None:
            raise not_found("no session with this name")
        return json_answer(row_as_json(row))


def _listed(live_view: LiveView, wanted: SessionFilter) -> dict[str, Any]:
    rows = [
        row
        for row in live_view.rows(REGISTRY_SESSIONS)
        if isinstance(row, SessionRow) and wanted.state in (None, row.status)
    ]
    newest = heapq.nlargest(wanted.limit, rows, key=lambda row: (row.created_at, row.session))
    return {"sessions": [row_as_json(row) for row in newest], "total": len(rows)}
