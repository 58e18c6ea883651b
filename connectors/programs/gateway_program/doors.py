"""The doors that one gateway process serves (hub, dashboard, MCP, commands), each with its own address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from connectors.doors.dashboard.application import Dashboard
from connectors.doors.out_of_band.door import OutOfBandDoor
from connectors.hub.engine.exchange import DoorEngine
from connectors.hub.services.hub import Hub
from connectors.programs.gateway_program.application import build_application


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
