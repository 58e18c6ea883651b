"""The HTTP routes that list agent definitions (HH-01) and the containers of tasks (HH-05)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request, Response

from connectors.gateway.messages.shown_messages import list_page
from connectors.gateway.rules.hub_models import AgentAnswer, AgentsAnswer, ContainersAnswer, TaskLimit
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.ordered_rows import OrderedRows
from connectors.gateway.services.row_lists import CONTAINER_LISTS
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import existing, json_answer, row_as_answer
from connectors.gateway.web.idempotency import caller_of
from connectors.gateway.web.models import NAME_PATTERN, PageFilter
from connectors.gateway.web.policy import Action
from connectors.launcher.protocol import AGENT_TOKEN_VARIABLE
from schemas.streams.agents.agent_registry import AgentRow
from schemas.streams.container.container_registry import ContainerRow
from trunkline_agent.wire.ids import NAME_LIMIT
from trunkline_agent.wire.moments import iso_moment

AGENTS: Final = "/api/hub/agents"
CONTAINERS: Final = "/api/hub/containers"
# Each container runs the agent of one task.
ROLE: Final = "agent"
AgentPath = Annotated[str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT, description="Name of the agent.")]


def add_agent_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that list agent definitions and the containers of tasks.

    Called once, when the gateway starts. The paths begin with `/api/hub/agents` and `/api/hub/containers`. The
    routes read from `hub`.
    """
    live_view, registrar = hub.live_view, hub.agents

    @routes.get(AGENTS, Action.AGENT_READ, AgentsAnswer)
    async def list_agents(request: Request, wanted: Annotated[PageFilter, Query()]) -> Response:
        """List all agents that have or had a definition, sorted by name.

        The field `faults` says, by file name, why a file in conf/agents is invalid. An answer has
        `limits.answer_bytes` at most.
        """
        rows, by = live_view.live(AgentRow), caller_of(request).principal
        found, left = await list_page(hub, by, rows, lambda row: row.agent_name, _agent_as_json, wanted.after)
        return json_answer({"agents": found, "left": left, "faults": registrar.faults})

    @routes.get(f"{AGENTS}/{{name}}", Action.AGENT_READ, AgentAnswer)
    async def show_agent(name: AgentPath) -> Response:
        """Show the agent with this name and its definition, or answer 404."""
        row = existing(live_view.get(AgentRow, name), "no agent with this name")
        return json_answer(_agent_as_json(row))

    @routes.get(CONTAINERS, Action.TASK_READ, ContainersAnswer)
    async def list_containers(wanted: Annotated[TaskLimit, Query()]) -> Response:
        """List the newest containers, which are the processes that run the agents of tasks, newest first.

        Ended containers are listed, too. `limit` is the largest number of containers.
        """
        return json_answer(await asyncio.to_thread(_containers, hub.lists.containers, wanted.limit))


def _containers(containers: OrderedRows[ContainerRow], limit: int) -> dict[str, Any]:
    rows = containers.newest(CONTAINER_LISTS, limit)
    return {
        "containers": [_container_as_json(row) for row in rows],
        "total": containers.count(CONTAINER_LISTS),
    }


def _agent_as_json(row: AgentRow) -> dict[str, Any]:
    return row_as_answer(AgentAnswer, row, name="agent_name")


def _container_as_json(row: ContainerRow) -> dict[str, Any]:
    return {
        "session_name": row.container,
        "container_name": row.container,
        "port": row.port,
        "role": ROLE,
        "state": row.state,
        "secrets": [AGENT_TOKEN_VARIABLE],
        "backend": row.backend,
        "task_id": row.task_id,
        "error": row.error,
        "changed_at": iso_moment(row.changed_at),
    }
