"""The hub's HTTP streams: settled records of all streams or of one job, and verdicts for the MQTT bridge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import Query, Request, Response
from pydantic import Field

from connectors.doors.http_api.feed.verdict_lines import (
    FILE_DOOR,
    ReceiptVerdicts,
    file_verdicts,
    verdict_lines,
)
from connectors.hub.engine.operation import owner_by
from connectors.hub.services.hub import Hub
from connectors.hub.services.settled_stream import (
    EventWriter,
    Follower,
    Wanted,
    kinds_for,
    server_events,
    snapshot_rows,
)
from connectors.hub.serving.admission import Gate, Routes
from connectors.hub.serving.answers import DOOR, not_found, row_as_json
from connectors.hub.serving.models import ERRORS, QueryFilter
from connectors.hub.serving.policy import Action
from connectors.hub.serving.streaming_answer import EVENT_STREAM, LastEventId, Reserve, StreamingAnswer
from connectors.operations.agents.agent_operations import participant_as_json
from connectors.operations.rules.owners import session_of_job
from connectors.operations.work.job_operations import JOBS, JobPath
from schemas.streams.agents.participants import ParticipantRow
from schemas.streams.job.job_registry import JobRow
from schemas.streams.principal.principals import OPERATOR
from trunkline_agent.wire.ids import JOB, NAME_LIMIT, stream_key

NDJSON: Final = "application/x-ndjson"
Chunks = Callable[[Follower, Reserve], AsyncIterator[bytes]]
"""Returns the bytes of a stream of settled records."""


class EventFilter(QueryFilter):
    """The settled records to stream: the records that match every filter."""

    stream: (
        Annotated[str, Field(max_length=2 * NAME_LIMIT + 20, pattern=r"^[a-z]+/[A-Za-z0-9._/-]+$")] | None
    ) = None
    """Stream of the records, such as `job/0a1b2c3d`. Without it: any."""
    kind: Annotated[str, Field(pattern=r"^[a-z]+$", max_length=20)] | None = None
    """Kind of the records' streams, such as `job`. Without it: any."""
    type: Annotated[str, Field(pattern=r"^[a-z_.]+(,[a-z_.]+)*$", max_length=200)] | None = None
    """Types of the records, such as `job.registered`, joined by commas. Without it: any."""
    verdict: Literal["accepted", "duplicate", "rejected"] | None = None
    """Verdict on the records. Without it: any."""


class VerdictFilter(QueryFilter):
    """The records whose verdicts to stream."""

    door: Literal["mqtt", "file"] = "mqtt"
    """`mqtt`: events and messages that came over MQTT. `file`: messages of the file queue."""


def _documented(media_type: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}, **ERRORS}


def add_stream_routes(routes: Routes, hub: Hub, gate: Gate) -> None:
    """Add the routes `/api/hub/events`, `/api/hub/jobs/{job_id}/events` and `/api/hub/verdicts`.

    During a stream, `gate` checks whether the client's token is still valid. If not, the stream ends.
    """

    def agent(name: str) -> dict[str, Any] | None:
        row = hub.live_view.get(ParticipantRow, name)
        return None if row is None else participant_as_json(row)

    places, writer = hub.new_stream_places(DOOR), EventWriter(hub.boot_id, agent)

    def answer(request: Request, chunks: Chunks, media_type: str) -> StreamingAnswer:
        follower = Follower(hub.live_view.feed, lambda: not hub.stopping.is_set() and gate.still_holds(request))
        return places.answer(request.state.caller, partial(chunks, follower), media_type)

    def events(rows: Callable[[], Any], wanted: Wanted, last_id: str | None) -> Chunks:
        return lambda follower, reserve: server_events(writer, follower, wanted, last_id, rows, reserve)

    @routes.get(
        "/api/hub/events", Action.EVENTS_READ, response_class=Response, responses=_documented(EVENT_STREAM)
    )
    async def follow_all(
        request: Request, asked: Annotated[EventFilter, Query()], last_event_id: LastEventId = None
    ) -> Response:
        """Stream settled records as server-sent events: first `snapshot`, then `settled`.

        The event `gap` reports that events were missed. A record that changes the registry of agents has an
        additional event before its `settled`: `agent:created`, `agent:updated` or `agent:removed`, with the
        present state of the agent. Only the operator sees other streams than those of jobs and sessions.
        """
        kinds = kinds_for(request.state.caller.role == OPERATOR, asked.kind)
        types = None if asked.type is None else frozenset(asked.type.split(","))
        wanted = Wanted(kinds, asked.stream, types, asked.verdict)

        def rows() -> Any:
            return snapshot_rows(hub.live_view, hub.lists, wanted)

        return answer(request, events(rows, wanted, last_event_id), EVENT_STREAM)

    @routes.get(
        f"{JOBS.path}/{{job_id}}/events",
        Action.JOB_READ,
        owner_of=owner_by(hub, partial(session_of_job, hub)),
        response_class=Response,
        responses=_documented(EVENT_STREAM),
    )
    async def follow_job(request: Request, job_id: JobPath, last_event_id: LastEventId = None) -> Response:
        """Stream the settled records of one job: first `snapshot` with its row, then `settled`.

        The answer is 404 for an unknown job. The event `gap` reports that events were missed.
        """
        if hub.live_view.get(JobRow, job_id) is None:
            raise not_found("no job with this id")
        wanted = Wanted(stream=stream_key(JOB, job_id))

        def row() -> Any:
            found = hub.live_view.get(JobRow, job_id)
            return {"row": None if found is None else row_as_json(found)}

        return answer(request, events(row, wanted, last_event_id), EVENT_STREAM)

    @routes.get(
        "/api/hub/verdicts", Action.VERDICTS_READ, response_class=Response, responses=_documented(NDJSON)
    )
    async def follow_verdicts(request: Request, asked: Annotated[VerdictFilter, Query()]) -> Response:
        """Stream the verdicts on records of a bridge, as lines of JSON; `{}` at least every second."""
        verdicts_of = file_verdicts if asked.door == FILE_DOOR else ReceiptVerdicts(hub.limits.may_refuse).of
        return answer(request, lambda follower, _: verdict_lines(follower, verdicts_of), NDJSON)
