"""The dashboard's JSON routes (snapshot, agents, mailboxes, jobs, rejections) and its stream of live events."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import FastAPI, Header, Path, Query, Request, Response

from connectors.doors.dashboard.agent_board import AgentBoard
from connectors.doors.dashboard.entrance import Entrance
from connectors.doors.dashboard.event_broadcast import DOOR, LENGTH_LIMIT, EventBroadcast
from connectors.doors.dashboard.past_records_reader import job_history
from connectors.doors.dashboard.pulse import Pulse
from connectors.doors.dashboard.rejections import KEPT, Rejections
from connectors.doors.dashboard.shown_rows import is_shown, job_as_json, jobs_page, record_as_json
from connectors.doors.dashboard.task_board import TaskBoard
from connectors.doors.dashboard.webhook_board import webhooks_as_json
from connectors.hub.live.verdict_reader import verdict_in_ledger
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import encoded_within, json_answer, not_found
from connectors.hub.serving.models import JOB_ID_PATTERN, LIST_LIMIT
from connectors.hub.serving.streaming_answer import StreamPlaces
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.wire.partitions import Position
from trunkline_agent.errors import TrunklineError

_OFFSET_LIMIT: Final = 10**15
# The number of answers that may read the ledger at once, so that callers cannot occupy all threads of the
# gateway.
_LEDGER_READERS: Final = 2
_FIRST_JOBS: Final = 200
_FIRST_REJECTED: Final = 50

JobPath = Annotated[str, Path(pattern=JOB_ID_PATTERN)]
JobState = Literal["pending", "running", "completed", "error", "cancelled"]
Limit = Annotated[int, Query(ge=1, le=LIST_LIMIT)]
Offset = Annotated[int, Query(ge=-1, le=_OFFSET_LIMIT)]


class Shown(NamedTuple):
    """The objects from which the dashboard's routes read their answers."""

    board: AgentBoard
    tasks: TaskBoard
    pulse: Pulse
    rejections: Rejections
    broadcast: EventBroadcast


def add_data_routes(app: FastAPI, hub: Hub, entrance: Entrance, shown: Shown) -> None:
    """Add the routes that answer with JSON: snapshot, agents, mailboxes, jobs, rejections, single records.

    Each route calls `entrance.admit` first.
    """
    _add_snapshot(app, hub, entrance, shown)
    _add_jobs(app, hub, entrance)
    _add_rejections(app, hub, entrance, shown)


def _add_snapshot(app: FastAPI, hub: Hub, entrance: Entrance, shown: Shown) -> None:
    def snapshot(role: str) -> dict[str, Any]:
        return {
            "agents": shown.board.rows(),
            "tasks": shown.tasks.newest(),
            "jobs": hub.lists.jobs_by_state(),
            "first_jobs": jobs_page(hub.live_view, hub.lists, None, None, _FIRST_JOBS),
            "mailboxes": shown.pulse.mailboxes,
            "webhooks": webhooks_as_json(hub),
            "rejections": _rejections(shown, None, role, _FIRST_REJECTED),
            "history": shown.pulse.history(),
        }

    @app.get("/api/snapshot")
    async def show_snapshot(request: Request) -> Response:
        """Return all data that the web page shows at first, and the log position of this data.

        A browser requests it after it has received the event `hello`, so that no change is missed in between.
        """
        caller = entrance.admit(request, "/api/snapshot")
        position = shown.broadcast.position
        found = await asyncio.to_thread(snapshot, caller.role)
        who = {"principal": caller.principal, "role": caller.role}
        return json_answer({"position": position, **who, **found})

    @app.get("/api/agents")
    async def list_agents(request: Request) -> Response:
        """Return participants, then agents of running tasks, then the 50 participants that stopped last."""
        entrance.admit(request, "/api/agents")
        return json_answer({"agents": await asyncio.to_thread(shown.board.rows)})

    @app.get("/api/mailboxes")
    async def list_mailboxes(request: Request) -> Response:
        """Return the 200 deepest mailboxes. The answer is at most about a second old."""
        entrance.admit(request, "/api/mailboxes")
        return json_answer(shown.pulse.mailboxes)


def _add_jobs(app: FastAPI, hub: Hub, entrance: Entrance) -> None:
    ledger = asyncio.Semaphore(_LEDGER_READERS)

    @app.get("/api/jobs")
    async def list_jobs(
        request: Request,
        state: JobState | None = None,
        after: Annotated[str | None, Query(pattern=JOB_ID_PATTERN)] = None,
        limit: Limit = LIST_LIMIT,
    ) -> Response:
        """Return at most `limit` jobs in one state (without `state`: in any), newest first.

        `next` in the answer is the `after` of the following page, and null on the last page.
        """
        entrance.admit(request, "/api/jobs")
        found = await asyncio.to_thread(jobs_page, hub.live_view, hub.lists, state, after, limit)
        return json_answer(found)

    @app.get("/api/jobs/{job_id}")
    async def show_job(request: Request, job_id: JobPath, after: Offset | None = None) -> Response:
        """Return one job and its newest records, oldest first, from memory and the ledger.

        With `after`, only the records beyond that offset of the job's partition. `older_left_out` is true if
        earlier records may be missing. If the ledger cannot be read, the answer has no records, and `why` has
        the reason; otherwise `why` is null. The answer is 404 for an unknown job.
        """
        caller = entrance.admit(request, "/api/jobs/{job_id}")
        if hub.job_row(job_id) is None:
            raise not_found("no job with this id")
        async with ledger:
            why = None
            try:
                records, cut = await asyncio.to_thread(job_history, hub.settings, hub.live_view, job_id, after)
            except TrunklineError as error:
                records, cut, why = [], True, str(error)
        row = hub.job_row(job_id)
        most = hub.settings.limits.answer_bytes
        shown = encoded_within((record_as_json(record, caller.role) for record in reversed(records)), most)
        return json_answer(
            {
                "job": None if row is None else job_as_json(hub.live_view, row),
                "description": None if row is None else row.description,
                "records": shown[::-1],
                "older_left_out": cut or len(shown) < len(records),
                "why": why,
                "offset": hub.live_view.row_offset(REGISTRY_JOBS, job_id),
            }
        )


def _rejections(shown: Shown, reason: str | None, role: str, limit: int) -> dict[str, Any]:
    events = [record_as_json(record, role) for record in shown.rejections.newest(reason, role, limit)]
    return {"reasons": shown.rejections.by_reason(role), "events": events}


def _add_rejections(app: FastAPI, hub: Hub, entrance: Entrance, shown: Shown) -> None:
    ledger = asyncio.Semaphore(_LEDGER_READERS)

    @app.get("/api/rejections")
    async def list_rejections(
        request: Request,
        reason: Annotated[str | None, Query(pattern=r"^[a-z_]{1,40}$")] = None,
        limit: Annotated[int, Query(ge=1, le=KEPT)] = _FIRST_REJECTED,
    ) -> Response:
        """Return each reason with its count, and the newest `limit` records that were rejected for `reason`.

        Without `reason`, the records are those of all reasons. Records that the caller's role may not see are
        left out, but counted.
        """
        caller = entrance.admit(request, "/api/rejections")
        return json_answer(await asyncio.to_thread(_rejections, shown, reason, caller.role, limit))

    @app.get("/api/records/{partition}/{offset}")
    async def show_record(
        request: Request,
        partition: Annotated[int, Path(ge=0, le=1023)],
        offset: Annotated[int, Path(ge=0, le=_OFFSET_LIMIT)],
    ) -> Response:
        """Return the settled record at a position of the log, from memory or from the ledger.

        The answer is 404 while no record is settled there, and for a record that the caller's role may not see.
        """
        caller = entrance.admit(request, "/api/records/{partition}/{offset}")
        position = Position(partition, offset)
        found = hub.live_view.feed.find(position)
        if found is None:
            async with ledger:
                found = await asyncio.to_thread(verdict_in_ledger, hub.settings, position)
        if found is None or not is_shown(found, caller.role):
            raise not_found("no record was settled at this position, or it is not in the ledger yet")
        return json_answer(record_as_json(found, caller.role))


EVENTS: Final = "/api/events"
EVENT_STREAM: Final = "text/event-stream"
# The longest time that one write waits for the client, and the size of the kernel's send buffer.
STALLED_S: Final = 5.0
SEND_BUFFER_BYTES: Final = 256 * 1024


def add_event_routes(app: FastAPI, hub: Hub, entrance: Entrance, broadcast: EventBroadcast) -> None:
    """Add `/api/events`, the stream of server-sent events with which the web page updates itself.

    The route calls `entrance.admit` first. It bounds the streams of all principals and of each one.
    """
    streams, on_unread = hub.settings.gateway.streams, partial(hub.metrics.dropped, DOOR)
    places = StreamPlaces(hub.answer_memory, streams, unread_s=STALLED_S, on_unread=on_unread)

    @app.get(EVENTS)
    async def follow(
        request: Request,
        last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=LENGTH_LIMIT)] = None,
        after: Annotated[str | None, Query(max_length=LENGTH_LIMIT)] = None,
    ) -> Response:
        """Stream changes of agents, jobs, tasks and messages, and the verdict of each record.

        The stream ends when the client disconnects or is too slow, its login becomes invalid, or the gateway
        stops. `after` is the same as `Last-Event-ID`: the id of the last event received. It is for a client
        that reconnects by itself.
        """
        caller = entrance.admit(request, EVENTS)

        def goes_on() -> bool:
            return not hub.stopping.is_set() and entrance.still_holds(request, caller)

        return places.answer(
            caller, partial(broadcast.follow, caller.role, last_event_id or after, goes_on), EVENT_STREAM
        )
