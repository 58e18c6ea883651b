"""The operations that list agent definitions (HH-01) and the containers of tasks (HH-05)."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Path

from connectors.hub.engine.family import Family, LongAnswer, page_by_age, page_by_name
from connectors.hub.engine.operation import Asked
from connectors.hub.launcher.launch_spec import AGENT_TOKEN_VARIABLE
from connectors.hub.live.row_lists import CONTAINER_LISTS
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import existing, row_as_answer
from connectors.hub.serving.models import NAMED, PageFilter
from connectors.hub.serving.policy import Action
from connectors.operations.rules.hub_models import AgentAnswer, AgentsAnswer, ContainersAnswer, TaskLimit
from schemas.streams.agents.agent_registry import AgentRow
from schemas.streams.container.container_registry import ContainerRow
from trunkline_agent.wire.moments import iso_moment

AGENTS: Final = Family("/api/hub/agents")
CONTAINERS: Final = Family("/api/hub/containers")
# Each container runs the agent of one task.
ROLE: Final = "agent"
AgentPath = Annotated[str, Path(**NAMED, description="Name of the agent.")]


@AGENTS.get("", Action.AGENT_READ, AgentsAnswer)
def list_agents(hub: Hub, asked: Asked, wanted: PageFilter) -> LongAnswer:
    """List all agents that have or had a definition, sorted by name.

    The field `faults` says, by file name, why a file in conf/agents is invalid. An answer has
    `limits.answer_bytes` at most.
    """
    rows, faults = hub.live_view.live(AgentRow), hub.agents.faults
    return page_by_name(hub, "agents", rows, lambda row: row.agent_name, wanted, _agent_as_json, faults=faults)


@AGENTS.get("/{name}", Action.AGENT_READ, AgentAnswer, COMMAND="agents show")
def show_agent(hub: Hub, asked: Asked, name: AgentPath) -> dict[str, Any]:
    """Show the agent with this name and its definition, or answer 404."""
    return _agent_as_json(existing(hub.live_view.get(AgentRow, name), "no agent with this name"))


@CONTAINERS.get("", Action.TASK_READ, ContainersAnswer, COMMAND="tasks containers")
def list_containers(hub: Hub, asked: Asked, wanted: TaskLimit) -> LongAnswer:
    """List the newest containers, which are the processes that run the agents of tasks, newest first.

    Ended containers are listed, too. `limit` is the largest number of containers.
    """
    rows, shown = hub.lists.containers, _container_as_json
    return page_by_age(hub, "containers", rows, CONTAINER_LISTS, wanted.limit, shown, is_bounded=False)


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
