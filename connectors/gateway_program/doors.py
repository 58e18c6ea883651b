"""The applications that the gateway serves, each on a port of its own, in one process over one live view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from connectors.dashboard.application import Dashboard
from connectors.gateway.services.hub import Hub
from connectors.gateway_program.application import build_application
from connectors.out_of_band.door import OutOfBandDoor


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Door:
    """One application and where it listens. `setting` names its port; `opened` is called when the hub is open,
    before anybody is served. `send_buffer_bytes`: what the kernel keeps for one slow reader at most, None for
    its default. `socket_path`: it listens on this Unix socket instead, which one gateway has at a time.
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


def doors_of(hub: Hub) -> list[Door]:
    """The doors that the settings open. Called before the hub is: who wants to hear of changes from the first
    one on, registers with its live view here.
    """
    gateway, dashboard, agent_mcp = hub.settings.gateway, hub.settings.dashboard, hub.settings.agent_mcp
    doors = [Door("hub", build_application(hub), gateway.host, gateway.port, "gateway.port")]
    if dashboard.port:
        page = Dashboard(hub)
        doors.append(
            Door(
                "dashboard",
                page.app,
                dashboard.host,
                dashboard.port,
                "dashboard.port",
                opened=page.opened,
                lifespan="on",
                send_buffer_bytes=page.send_buffer_bytes,
            )
        )
    if agent_mcp.port:
        # Half a second of imports, that a gateway without this door need not pay.
        from connectors.agent_mcp.door import AgentMcp

        mcp = AgentMcp(hub)
        doors.append(
            Door(
                "agent_mcp",
                mcp.app,
                agent_mcp.host,
                agent_mcp.port,
                "agent_mcp.port",
                opened=mcp.opened,
                lifespan="on",
            )
        )
    commands = OutOfBandDoor(hub)
    path, setting = hub.settings.command_socket, "xml_pump.command_socket"
    doors.append(Door("commands", commands.app, "", 0, setting, socket_path=path))
    return doors
