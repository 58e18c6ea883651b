"""The dashboard's web application (AM-11 to AM-13): the page, its data, and who may read it.

**Delivers** the state of the live view, as it changes. As the hub, it appends two kinds of records: that of a
refused request, and the message that replays a dead one.

The first check of a request is that of its Host and Origin (AM-13). A page of another site, in the same
browser, may send requests to a loopback port from any origin. With DNS rebinding it may do so under any name
that resolves to that port's address. Such a request is answered with 403.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from connectors.doors.dashboard.entrance import Entrance, Logins, add_login_routes
from connectors.doors.dashboard.event_broadcast import EventBroadcast
from connectors.doors.dashboard.past_records import Rejections
from connectors.doors.dashboard.routes import Shown, router
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import add_error_handlers, error_response, not_found
from connectors.hub.serving.bounded_http import HeadRequests
from connectors.hub.serving.metrics import AccessLog
from connectors.hub.serving.streaming_answer import MEDIA_TYPES, SEND_BUFFER_BYTES, PageFile
from connectors.hub.serving.strict_request import LOOPBACK_NAMES, NOT_KNOWN, HostNames, name_and_port
from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token
from schemas.settings.setting_types import host_names_of
from trunkline_agent.wire.verdicts import POLICY

_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104  compared, not bound
_USUAL_PORTS: Final = {"http": 80, "https": 443}
_OUR_SITES: Final = ("same-origin", "none")

_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


class Guard:
    """ASGI middleware that answers requests of other sites with 403, and adds security headers to all answers.

    It wraps the dashboard's application. `scheme`, `host` and `port` are the address that the dashboard listens
    on. `names` are further host names under which browsers reach it, through a proxy: on any port, by HTTP or
    HTTPS.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, scheme: str = "http", names: Iterable[str] = ()
    ) -> None:
        self._app = app
        self._is_wildcard = host in _WILDCARDS
        self._scheme = scheme
        self._ports = {str(port), *([""] if port == _USUAL_PORTS[scheme] else [])}
        self._hosts = HostNames((*LOOPBACK_NAMES, host))
        self._further = HostNames(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of another site with 403, and pass any other request on to the application.

        Every answer gets the security headers, such as `content-security-policy`.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        why = self._why_not(scope)
        if why is None:
            await self._app(scope, receive, with_headers)
        else:
            await error_response(403, POLICY, why)(scope, receive, with_headers)

    def _why_not(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = [name_and_port(host) for host in headers.getlist("host")]
        if len(hosts) != 1 or not self._is_ours(hosts[0], scope):
            return f"the dashboard does not answer under this Host; {NOT_KNOWN}"
        schemes = ("http", "https") if hosts[0][0] in self._further else (self._scheme,)
        for origin in headers.getlist("origin"):
            found, _, host = origin.partition("://")
            if found.lower() not in schemes or name_and_port(host) != hosts[0]:
                return "the dashboard does not answer to pages of another Origin"
        site, mode = headers.getlist("sec-fetch-site"), headers.getlist("sec-fetch-mode")
        # A link of another site may lead to the page itself, which shows nothing before it has asked for its
        # data.
        if site and site[-1] not in _OUR_SITES and not (scope["path"] == "/" and mode[-1:] == ["navigate"]):
            return "the dashboard does not answer to pages of another site"
        return None

    def _is_ours(self, host: tuple[str, str], scope: Scope) -> bool:
        name, port = host
        if name in self._further:
            return True
        if port not in self._ports:
            return False
        server = scope.get("server")
        # An IP address is safe: only names can be made to resolve to another address.
        return name in self._hosts or (
            self._is_wildcard and server is not None and name in HostNames((server[0],))
        )


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
