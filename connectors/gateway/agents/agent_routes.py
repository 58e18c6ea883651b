"""The agents of the hub (HH-01), and what was launched for their tasks (HH-05)."""

from __future__ import annotations

import asyncio
import heapq
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query, Response

from connectors.gateway.rules.hub_models import AgentAnswer, AgentsAnswer, ContainersAnswer, TaskLimit
from connectors.gateway.rules.hub_policy import agent_row
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import asks_for
from connectors.gateway.web.answers import iso_moment, json_answer, not_found
from connectors.gateway.web.models import ERRORS, NAME_PATTERN
from connectors.gateway.web.policy import Action
from connectors.launcher.protocol import AGENT_TOKEN_VARIABLE
from connectors.live.live_view import LiveView
from schemas.fold.view_rows import REGISTRY_AGENTS, REGISTRY_CONTAINERS, AgentRow, ContainerRow
from schemas.wire.ids import NAME_LIMIT

AGENTS: Final = "/api/hub/agents"
CONTAINERS: Final = "/api/hub/containers"
# What a launcher makes is the worker of one task.
ROLE: Final = "agent"
AgentPath = Annotated[str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT)]


def add_agent_routes(app: FastAPI, hub: Hub) -> None:
    """Add the routes under `/api/hub/agents` and `/api/hub/containers`."""

    @app.get(AGENTS, response_model=AgentsAnswer, responses=ERRORS)
    @asks_for(Action.AGENT_READ)
    async def list_agents() -> Response:
        """List all agents by name, and the files of conf/agents that define none."""
        rows = [row for row in hub.live_view.rows(REGISTRY_AGENTS) if isinstance(row, AgentRow)]
        agents = [_agent_as_json(row) for row in sorted(rows, key=lambda row: row.agent_name)]
        return json_answer({"agents": agents, "faults": hub.agents.faults})

    @app.get(f"{AGENTS}/{{name}}", response_model=AgentAnswer, responses=ERRORS)
    @asks_for(Action.AGENT_READ)
    async def show_agent(name: AgentPath) -> Response:
        """Show one agent."""
        row = agent_row(hub.live_view, name)
        if row is None:
            raise not_found("no agent with this name")
        return json_answer(_agent_as_json(row))

    @app.get(CONTAINERS, response_model=ContainersAnswer, responses=ERRORS)
    @asks_for(Action.TASK_READ)
    async def list_containers(wanted: Annotated[TaskLimit, Query()]) -> Response:
        """List what was launched for tasks, newest first."""
        return json_answer(await asyncio.to_thread(_containers, hub.live_view, wanted.limit))


def _containers(live_view: LiveView, limit: int) -> dict[str, Any]:
    rows = [row for row in live_view.rows(REGISTRY_CONTAINERS) if isinstance(row, ContainerRow)]
    newest = heapq.nlargest(limit, rows, key=lambda row: (row.created_at, row.container))
    return {"containers": [_container_as_json(row) for row in newest], "total": len(rows)}


def _agent_as_json(row: AgentRow) -> dict[str, Any]:
    return {
        "name": row.agent_name,
        "image": row.image,
        "description": row.description,
        "capabilities": row.capabilities,
        "hardened": row.hardened,
        "status": row.status,
        "defined_at": iso_moment(row.defined_at),
    }


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
