"""The doors that one gateway process serves (hub, dashboard, MCP, commands), and the hub's FastAPI application.

The application has all routes of the HTTP API, its access check, and its error handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp

from connectors.doors.dashboard.application import Dashboard
from connectors.doors.http_api.contracts.document_routes import add_api_page, add_contract_routes
from connectors.doors.http_api.pump.pump_routes import LISTENERS, THREADS, add_pump_routes
from connectors.doors.http_api.pump.xml_routes import add_xml_routes
from connectors.doors.http_api.routes.blob_routes import add_blob_routes
from connectors.doors.http_api.routes.endpoint_routes import EndpointRoutes
from connectors.doors.http_api.routes.mailbox_stream import add_follow_route
from connectors.doors.http_api.routes.stream_routes import add_stream_routes
from connectors.doors.out_of_band.door import OutOfBandDoor
from connectors.hub.engine.direct_http import DoorEngine
from connectors.hub.engine.engine import Engine
from connectors.hub.engine.family import add_operation
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import AdmittedRoute, Gate, Routes, open_to_all
from connectors.hub.serving.answers import NOT_READY, add_error_handlers, json_answer, unavailable
from connectors.hub.serving.api_document import documented
from connectors.hub.serving.bounded_http import HeadRequests
from connectors.hub.serving.metrics import CONTENT_TYPE, AccessLog
from connectors.hub.serving.models import ERRORS, HealthAnswer, ReadyAnswer
from connectors.operations.every_operation import OPERATIONS
from connectors.operations.messages.message_operations import MESSAGES
from connectors.operations.work.job_operations import add_event_route

TITLE: Final = "Trunkline hub"
VERSION: Final = "1"
# A drain is a GET that takes messages.
_TAKING_PATHS: Final = frozenset({MESSAGES})


def build_application(hub: Hub) -> FastAPI:
    """Return the hub's FastAPI application, with all routes of the HTTP API and their access check.

    The hub need not be open yet, but must be open before the first request.
    """
    # Not the documentation pages of FastAPI, because they load scripts from other hosts.
    gate = Gate(
        hub.identities,
        hub.refusals,
        hub.settings.limits.payload_bytes,
        hub.prune_token,
        hub.turns,
        hub.pace,
    )
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = HubApplication(hub, gate, title=TITLE, version=VERSION, **pages)
    app.router.route_class = AdmittedRoute
    app.state.gate = gate
    add_error_handlers(app)
    _add_health_routes(app, hub)
    add_api_page(app)
    add_contract_routes(app, hub.settings)
    routes = Routes(app)
    add_follow_route(routes, hub, gate)
    add_event_route(routes, hub)
    operations = [one(hub) for one in (*OPERATIONS, *LISTENERS.operations, *THREADS.operations)]
    for operation in operations:
        add_operation(routes, gate, operation)
    add_stream_routes(routes, hub, gate)
    add_blob_routes(routes, hub)
    add_xml_routes(routes, hub)
    add_pump_routes(routes, hub)
    app.state.operations = operations
    app.state.engine = Engine(hub, gate, operations)
    app.openapi = lambda: documented(app)  # type: ignore[method-assign]
    return app


class HubApplication(FastAPI):
    """The hub's FastAPI application, whose routes `EndpointRoutes` serves."""

    def __init__(self, hub: Hub, gate: Gate, **options: Any) -> None:
        # FastAPI would look for an SDK of OpenTelemetry at each request.
        super().__init__(telemetry={"tracing": False, "metrics": False, "logs": False}, **options)
        self._hub = hub
        self._gate = gate

    def build_middleware_stack(self) -> ASGIApp:
        """Return the ASGI application behind this object. Starlette calls it before the first request."""
        served = EndpointRoutes(super().build_middleware_stack(), self.routes, self._gate)
        hub, heads = self._hub, HeadRequests(served, _TAKING_PATHS)
        return AccessLog(heads, hub.metrics, hub.request_lines, hub.answer_memory)


def _add_health_routes(app: FastAPI, hub: Hub) -> None:
    @app.get("/healthz", response_model=HealthAnswer, responses=ERRORS)
    @open_to_all
    async def check_health() -> Response:
        """Return status 200, which shows that the gateway answers requests."""
        return json_answer({"status": "ok"})

    @app.get("/readyz", response_model=ReadyAnswer, responses=ERRORS)
    @open_to_all
    async def check_readiness() -> Response:
        """Return status 200 if the live view follows the log and Kafka accepts records, otherwise 503.

        With status 200, `lag` is the number of records behind the log's end by partition. With status 503, the
        message names the first part that does not work.
        """
        appender = hub.appender
        for is_missing, why in (
            (hub.stopping.is_set(), "the gateway is stopping"),
            (hub.live_view.failure is not None, "the live view has stopped"),
            (appender.is_topic_gone, "the topic of the log does not exist in Kafka"),
            (appender.away is not None, "Kafka is away"),
        ):
            if is_missing:
                raise unavailable(why, NOT_READY)
        lag = {str(number): records for number, records in hub.live_view.lag().items()}
        return json_answer({"status": "ready", "lag": lag})

    @app.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
    @open_to_all
    async def show_metrics() -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(await asyncio.to_thread(hub.metrics.text), media_type=CONTENT_TYPE)


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Door:
    """One ASGI application and the address at which the gateway serves it.

    Attributes:
        name: The name of the door for logs and metrics, such as `hub`.
        app: The ASGI application.
        setting: The name of the setting for the door's port or socket, for error messages.
        opened: Called when the hub is open, before the first request.
        lifespan: Whether the server must run the application's ASGI lifespan.
        send_buffer_bytes: The size of the kernel's send buffer for each connection; None for the default.
        socket_path: The Unix socket to listen on instead of host and port; None for a door with a port. Only
            one gateway at a time has the socket.
        engine: Serves usual requests of the door in the place of the application. None: there is none.
    """

    name: str
    app: Any
    host: str
    port: int
    setting: str
    opened: Callable[[], None] = _nothing
    lifespan: Literal["on", "off"] = "off"
    send_buffer_bytes: int | None = None
    socket_path: Path | None = None
    engine: DoorEngine | None = None


def doors_of(hub: Hub) -> list[Door]:
    """Create the applications that the settings enable, and return each as a door.

    Hub and commands are always among them. Dashboard and agent MCP server are left out if their port is 0. Call
    this function before `Hub.open`, because applications register callbacks of the live view.
    """
    gateway, dashboard, agent_mcp = hub.settings.gateway, hub.settings.dashboard, hub.settings.agent_mcp
    app = build_application(hub)
    doors = [Door("hub", app, gateway.host, gateway.port, "gateway.port", engine=app.state.engine)]
    if dashboard.port:
        page = Dashboard(hub)
        door = Door("dashboard", page.app, dashboard.host, dashboard.port, "dashboard.port", page.opened, "on")
        doors.append(replace(door, send_buffer_bytes=page.send_buffer_bytes))
    if agent_mcp.port:
        # This import takes half a second, so a gateway without this door skips it.
        from connectors.doors.mcp_tools.agents.door import AgentMcp

        mcp = AgentMcp(hub)
        at = (agent_mcp.host, agent_mcp.port, "agent_mcp.port")
        doors.append(Door("agent_mcp", mcp.app, *at, mcp.opened, "on", engine=mcp.direct))
    commands = OutOfBandDoor(hub)
    path, setting = hub.settings.command_socket, "xml_pump.command_socket"
    doors.append(Door("commands", commands.app, "", 0, setting, socket_path=path))
    return doors
