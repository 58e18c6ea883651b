"""`GET /api/events`: what changes, by server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import FastAPI, Header, Query, Request, Response

from connectors.dashboard.entrance import Entrance
from connectors.dashboard.event_broadcast import DOOR, EventBroadcast
from connectors.dashboard.log_position import LENGTH_LIMIT
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import BUSY, unavailable
from connectors.gateway.web.streaming_answer import StreamingAnswer, StreamPlaces

EVENTS: Final = "/api/events"
EVENT_STREAM: Final = "text/event-stream"
# How long one write may wait for the client; and what the kernel takes for it meanwhile.
STALLED_S: Final = 5.0
SEND_BUFFER_BYTES: Final = 256 * 1024


def add_event_routes(app: FastAPI, hub: Hub, entrance: Entrance, broadcast: EventBroadcast) -> None:
    """Add `/api/events`."""
    places = StreamPlaces()

    @app.get(EVENTS)
    async def follow(
        request: Request,
        last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=LENGTH_LIMIT)] = None,
        after: Annotated[str | None, Query(max_length=LENGTH_LIMIT)] = None,
    ) -> Response:
        """Follow agents, jobs, tasks, messages and verdicts. `after`: as Last-Event-ID, for who makes a new
        connection by hand.
        """
        caller = entrance.admit(request, EVENTS)
        if not places.take(caller.principal):
            raise unavailable("too many followers at once; come again later", BUSY)

        def goes_on() -> bool:
            return not hub.stopping.is_set() and entrance.still_holds(request, caller)

        def chunks() -> AsyncIterator[bytes]:
            return broadcast.follow(caller.role, last_event_id or after, goes_on)

        def ended() -> None:
            places.give_back(caller.principal)

        def stalled() -> None:
            hub.metrics.dropped(DOOR)

        return StreamingAnswer(chunks, EVENT_STREAM, ended, STALLED_S, stalled)
