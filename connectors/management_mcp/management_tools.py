"""What the tools of the management MCP door take and do (AM-09): each asks the gateway as the operator.

**Delivers** each spawn once for each idempotency key. Without one, the key is this server's own and the id of
the call: a call that is delivered twice starts one agent, and so does one that the client of the gateway sends
again because no answer came. Two calls are two spawns; of two with one `agentId` the second is refused.
**Loses when** never silently: an error for a gateway that is away tells the key to try again with.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Final

from mcp import types
from pydantic import BaseModel, Field

from connectors.dashboard.address import address_of
from connectors.gateway_client import GatewayClient, path_of
from connectors.mcp_tool import ToolArguments, tool_of
from schemas.agent_registry import Capabilities
from schemas.errors import BackboneUnreachable
from schemas.settings import Settings
from schemas.task_registry import TASK_TEXT_LIMIT
from schemas.wire_body import Name, Printable


class SpawnAgent(ToolArguments):
    """Arguments of `spawn_agent`."""

    agent_id: Annotated[Name | None, Field(description="Its name; without one it gets one.")] = None
    task: Annotated[Printable, Field(min_length=1, max_length=TASK_TEXT_LIMIT, description="What it is to do.")]
    capabilities: Capabilities = Field([], description="What others may find it by.")
    idempotency_key: Annotated[
        str | None,
        Field(
            pattern=r"^[\x21-\x7e]{1,200}$",
            description="The same key again is the same spawn, and starts no second agent.",
        ),
    ] = None


class ListAgents(ToolArguments):
    """Arguments of `list_agents`: there are none."""


class StopAgent(ToolArguments):
    """Arguments of `stop_agent`."""

    agent_id: Annotated[Name, Field(description="Which agent.")]


class ManagementTools:
    """The tools. Each raises what the gateway's client raises, with the gateway's own words; none may be called
    on an event loop's thread.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._own = uuid.uuid4()

    def spawn_agent(self, asked: SpawnAgent, call: str) -> dict[str, Any]:
        """Start an agent and wait until it runs. The answer has the dashboard's address, if there is one.
        Raises Refused when it was not started, with the reason.
        """
        key = asked.idempotency_key or str(uuid.uuid5(self._own, call))
        body = {"agent_name": asked.agent_id, "task": asked.task, "capabilities": asked.capabilities}
        try:
            # A client for each call: a token that was made meanwhile counts.
            with GatewayClient(self._settings) as gateway:
                row = gateway.post(path_of("participants", "spawn"), body, request_id=f"spawn/{key}")
        except BackboneUnreachable as error:
            again = f"try again with idempotencyKey {key}: if the agent was started, it is the same"
            raise BackboneUnreachable(f"{error}; {again}") from None
        shown = _shown(row)
        if self._settings.dashboard.port:
            shown["dashboardUrl"] = address_of(self._settings)
        return shown

    def list_agents(self, asked: ListAgents, call: str) -> dict[str, Any]:
        """The agents that take part now, by name, spawned or not."""
        with GatewayClient(self._settings) as gateway:
            found = gateway.get(path_of("participants"))
        return {"agents": [_shown(row) for row in found["participants"]]}

    def stop_agent(self, asked: StopAgent, call: str) -> dict[str, Any]:
        """Stop an agent; one that has stopped already stays so. Raises NotFound."""
        with GatewayClient(self._settings) as gateway:
            return _shown(gateway.post(path_of("participants", asked.agent_id, "stop")))

    def tool(self, name: str) -> tuple[type[BaseModel], Callable[[Any, str], dict[str, Any]]] | None:
        """The arguments and the function of a tool, None for an unknown one."""
        model = ARGUMENTS.get(name)
        return None if model is None else (model, getattr(self, name))


ARGUMENTS: Final[dict[str, type[ToolArguments]]] = {
    "spawn_agent": SpawnAgent,
    "list_agents": ListAgents,
    "stop_agent": StopAgent,
}
_DESCRIPTIONS: Final = {
    "spawn_agent": (
        "Start an agent on the machine of the gateway, with a key of its own, and wait until it runs. It "
        "reads its mailbox and can be written to by its id."
    ),
    "list_agents": "List the agents that take part now: task, status, capabilities, start time.",
    "stop_agent": "Stop an agent: its process ends, its key is deleted, its mailbox is closed.",
}


def described_tools() -> list[types.Tool]:
    """The tools as `tools/list` shows them."""
    return [
        tool_of(
            name,
            model,
            _DESCRIPTIONS[name],
            only_reads=name == "list_agents",
            destroys=name == "stop_agent",
            is_idempotent=name != "spawn_agent",
        )
        for name, model in ARGUMENTS.items()
    ]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A participant in the words of the agents' own tools."""
    found = {
        "agentId": row["id"],
        "task": row["task"],
        "status": row["status"],
        "capabilities": row["capabilities"],
        "startedAt": _milliseconds(row["started_at"]),
    }
    if row["stopped_at"] is not None:
        found |= {"stoppedAt": _milliseconds(row["stopped_at"]), "stoppedWhy": row["stopped_why"]}
    return found


def _milliseconds(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)
