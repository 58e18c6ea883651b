"""The routes that follow along: settled records by SSE, of everything or of one job, and verdicts by line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final

from fastapi import FastAPI, Header, Query, Request, Response

from connectors.gateway.agents.participant_routes import participant_as_json
from connectors.gateway.feed.settled_stream import (
    EventWriter,
    Follower,
    Wanted,
    kinds_for,
    server_events,
    snapshot_rows,
    verdict_lines,
)
from connectors.gateway.rules.hub_policy import participant_row
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import Gate, asks_for
from connectors.gateway.web.answers import BUSY, not_found, row_as_json, unavailable
from connectors.gateway.web.models import ERRORS, EventFilter
from connectors.gateway.web.policy import Action
from connectors.gateway.web.streaming_answer import StreamingAnswer, StreamPlaces
from connectors.gateway.work.job_routes import JOBS, JobPath
from schemas.streams.principal.principals import OPERATOR
from schemas.wire.ids import JOB, stream_key

EVENT_STREAM: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=64)]


def _documented(media_type: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}, **ERRORS}


def add_stream_routes(app: FastAPI, hub: Hub, gate: Gate) -> None:
    """Add `/api/hub/events`, `/api/hub/jobs/{job_id}/events` and `/api/hub/verdicts`."""

    def agent(name: str) -> dict[str, Any] | None:
        row = participant_row(hub.live_view, name)
        return None if row is None else participant_as_json(row)

    places, writer = StreamPlaces(), EventWriter(hub.boot_id, agent)

    def answer(
        request: Request, chunks: Callable[[Follower], AsyncIterator[bytes]], media_type: str
    ) -> StreamingAnswer:
        principal = request.state.caller.principal
        if not places.take(principal):
            raise unavailable("too many followers at once; come again later", BUSY)
        follower = Follower(hub.live_view.feed, lambda: not hub.stopping.is_set() and gate.still_holds(request))
        return StreamingAnswer(lambda: chunks(follower), media_type, lambda: places.give_back(principal))

    async def session_of_job(request: Request) -> str | None:
        row = hub.job_row(str(request.path_params.get("job_id")))
        return None if row is None else row.session

    @app.get("/api/hub/events", response_class=Response, responses=_documented(EVENT_STREAM))
    @asks_for(Action.EVENTS_READ)
    async def follow_all(
        request: Request, asked: Annotated[EventFilter, Query()], last_event_id: LastEventId = None
    ) -> Response:
        """Follow what is settled: first `snapshot`, then `settled`; `gap` when something was missed.

        Before the `settled` of a record that changes the registry of agents comes `agent:created`,
        `agent:updated` or `agent:removed` with the agent as it is now.

        Only the operator sees other streams than those of jobs and sessions.
        """
        kinds = kinds_for(request.state.caller.role == OPERATOR, asked.kind)
        wanted = Wanted(kinds, asked.stream, asked.type, asked.verdict)

        def rows() -> Any:
            return snapshot_rows(hub.live_view, wanted)

        return answer(request, lambda f: server_events(writer, f, wanted, last_event_id, rows), EVENT_STREAM)

    @app.get(f"{JOBS}/{{job_id}}/events", response_class=Response, responses=_documented(EVENT_STREAM))
    @asks_for(Action.JOB_READ, session_of_job)
    async def follow_job(request: Request, job_id: JobPath, last_event_id: LastEventId = None) -> Response:
        """Follow one job: first `snapshot` with its row, then `settled`."""
        if hub.job_row(job_id) is None:
            raise not_found("no job with this id")
        wanted = Wanted(stream=stream_key(JOB, job_id))

        def row() -> Any:
            found = hub.job_row(job_id)
            return {"row": None if found is None else row_as_json(found)}

        return answer(request, lambda f: server_events(writer, f, wanted, last_event_id, row), EVENT_STREAM)

    @app.get("/api/hub/verdicts", response_class=Response, responses=_documented(NDJSON))
    @asks_for(Action.VERDICTS_READ)
    async def follow_verdicts(request: Request) -> Response:
        """Follow the verdicts on job events, from now on; an empty line object at least every second."""
        return answer(request, verdict_lines, NDJSON)
