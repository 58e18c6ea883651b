"""The dashboard's web application (AM-11 to AM-13): the page, its data, and who may read it.

**Delivers** the state of the live view, as it changes. As the hub, it appends two kinds of records: that of a
refused request, and the message that replays a dead one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp

from connectors.doors.dashboard.entrance import Entrance, Logins, add_login_routes
from connectors.doors.dashboard.event_broadcast import EventBroadcast
from connectors.doors.dashboard.guard import Guard
from connectors.doors.dashboard.past_records import Rejections
from connectors.doors.dashboard.routes import Shown, router
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import add_error_handlers, not_found
from connectors.hub.serving.bounded_http import HeadRequests
from connectors.hub.serving.metrics import AccessLog
from connectors.hub.serving.served_files import MEDIA_TYPES, PageFile
from connectors.hub.serving.streaming_answer import SEND_BUFFER_BYTES
from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token
from schemas.settings.setting_types import host_names_of

log = structlog.stdlib.get_logger(__name__)

_AGAIN_S: Final = 1.0
_FOLDER: Final = Path(__file__).resolve().parent / "page"


class Dashboard:
    """The dashboard's ASGI application `app`. The hub need not be open yet.

    Create it before `Hub.open`, because it registers callbacks of the live view. Call `opened` after
    `Hub.open`. The server of `app` must run the application's ASGI lifespan, which writes the live events.
    """

    send_buffer_bytes = SEND_BUFFER_BYTES

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.rejections = Rejections()
        self.broadcast = EventBroadcast(hub, self.rejections)
        hub.live_view.on_settled(self.broadcast.pulse.settled)
        hub.live_view.on_settled(self.rejections.settled)
        self.app = self._application()

    def opened(self) -> None:
        """Let the live events begin at the end of the log, and load the ledger's rejections in a thread.

        Call this method once, when the hub is open and before `app` serves requests. It does not wait for the
        thread.
        """
        self.broadcast.pulse.begin()
        self.broadcast.start_here()
        settings, live_view = self._hub.settings, self._hub.live_view
        threading.Thread(
            target=self.rejections.load, args=(settings, live_view), name="rejections", daemon=True
        ).start()

    def _application(self) -> ASGIApp:
        hub = self._hub
        app = FastAPI(
            docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=self._living
        )
        logins = Logins(hub.keyring, hub.identities, ensure_operator_token(hub.settings), hub.live_view)
        is_secure = hub.settings.http_scheme == "https"
        entrance = Entrance(logins, hub.refusals, hub.settings.dashboard.port, is_secure=is_secure)
        app.state.shown = Shown(hub, entrance, self.broadcast, self.rejections)
        add_error_handlers(app)
        _add_page_routes(app)
        add_login_routes(app, entrance, hub.settings.limits.payload_bytes)
        app.include_router(router)
        where = hub.settings.dashboard
        names = host_names_of(hub.settings.gateway.host_names)
        guarded = Guard(app, where.host, where.port, hub.settings.http_scheme, names)
        return AccessLog(HeadRequests(guarded), hub.metrics, hub.request_lines, hub.answer_memory)

    @asynccontextmanager
    async def _living(self, app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(self._run())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def _run(self) -> None:
        while True:
            try:
                await self.broadcast.run()
            except Exception:  # the page needs its live events, and the hub does not need the page
                log.exception("dashboard_events_failed")
            await asyncio.sleep(_AGAIN_S)


def _add_page_routes(app: FastAPI) -> None:
    # The dashboard serves no other file.
    paths = [path for path in _FOLDER.iterdir() if path.suffix in MEDIA_TYPES]
    files = {path.name: PageFile.of(path.read_bytes(), path.suffix) for path in paths}

    @app.get("/")
    async def page(request: Request) -> Response:
        request.scope["trunkline_route"] = "/"
        return files["index.html"].answer(request)

    @app.get("/page/{name}")
    async def page_file(request: Request, name: str) -> Response:
        request.scope["trunkline_route"] = "/page"
        if name not in files:
            raise not_found("the page has no such file")
        return files[name].answer(request)

    @app.get("/healthz")
    async def healthz(request: Request) -> Response:
        request.scope["trunkline_route"] = "/healthz"
        return Response(b'{"status":"ok"}', media_type="application/json")
