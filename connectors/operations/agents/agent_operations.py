"""The operations of agents: definitions (HH-01), containers (HH-05), participants (AM-03, AM-06, AM-09).

Spawning an agent starts a task with an image. The task keeper runs it, and the participant ends with the task.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Final

from fastapi import Path

from connectors.hub.engine.family import Family, LongAnswer, page_by_age, page_by_name
from connectors.hub.engine.operation import Answer, Asked, Call, Value
from connectors.hub.launcher.launch_spec import AGENT_TOKEN_VARIABLE
from connectors.hub.live.row_lists import CONTAINER_LISTS
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import (
    ApiError,
    check_task_text,
    existing,
    malformed,
    row_as_answer,
)
from connectors.hub.serving.models import NAMED, NoFields, PageFilter
from connectors.hub.serving.policy import Action
from connectors.operations.rules.agent_models import (
    AgentAnswer,
    AgentsAnswer,
    AgentStopRequest,
    ContainersAnswer,
    JoinRequest,
    KeyAnswer,
    KeyRequest,
    Participant,
    ParticipantAnswer,
    ParticipantFilter,
    ParticipantsAnswer,
    SpawnRequest,
    TaskLimit,
)
from connectors.operations.rules.owners import check_name_is_free
from connectors.operations.work.task_operations import start_task
from schemas.fold.stream_kind import STOPPED
from schemas.streams.agents.agent_registry import (
    AgentJoined,
    AgentKeyRegistered,
    AgentKeyRemoved,
    AgentKeyRow,
    AgentRow,
    AgentStopped,
    ParticipantRow,
)
from schemas.streams.container.containers import ContainerRow
from schemas.streams.task.task_registry import TaskCancellation
from schemas.wire.wire_body import TASK_TEXT_LIMIT
from trunkline_agent.mcp.signing import checked_public_key
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.signing import key_id_of
from trunkline_agent.wire.verdicts import DUPLICATE, ILLEGAL_TRANSITION

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


_POLL_S: Final = 0.02
KeyPath = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$", description="Id of the key, 16 hex digits.")]


def _participant(hub: Hub, name: str) -> ParticipantRow:
    return existing(hub.live_view.get(ParticipantRow, name), "no agent of this name takes part")


def _shown(hub: Hub, name: str) -> dict[str, Any]:
    return _as_json(_participant(hub, name), hub.lists.keys_of(name))


_VALUE: Final = Value(
    "AgentInfo",
    "An agent that takes part.",
    ("id", "status", "task", "capabilities", "started_at"),
    {"id": "name"},
)
_DISCOVER: Final = Call(
    "discover",
    _VALUE,
    "Return the agents that take part, sorted by name; by default all that have not stopped.",
    takes=("capability", "status"),
)
PARTICIPANTS: Final = Family("/api/hub/participants", _shown, "agent_name")


@PARTICIPANTS.post("", Action.PARTICIPANT_ADD, ParticipantAnswer, STATUS=201)
def register_participant(hub: Hub, asked: Asked, body: JoinRequest) -> AgentJoined:
    """Register an agent that runs outside Trunkline and signs its calls with its own private key.

    The body has the agent's public key. The answer is 403 when another agent has this key, or when a
    principal or listener has the name. It is 409 when a participant of this name has not stopped.
    """
    check_task_text(body.task, hub.settings.limits.task_characters)
    route = f"POST {PARTICIPANTS.path}"
    check_name_is_free(hub, body.agent_name, "agent_name", asked.principal, route, is_participant=True)
    return AgentJoined(
        agent_name=body.agent_name,
        request_id=asked.request_id,
        task=body.task,
        capabilities=body.capabilities,
        public_key=_checked_key(hub, asked, body.agent_name, body.public_key, route),
    )


@PARTICIPANTS.post("/spawn", Action.PARTICIPANT_ADD, ParticipantAnswer, STATUS=201)
async def spawn_participant(hub: Hub, asked: Asked, body: SpawnRequest) -> Answer:
    """Start an agent with a new key, register it as a participant, and wait until it runs.

    Without a name in the body, the gateway chooses one. The answer is 502 `launch_failed` when the agent
    cannot be started, and 409 when a participant of this name has not stopped.
    """
    check_task_text(body.task, hub.settings.limits.task_characters)
    name = body.agent_name or f"agent-{asked.request_id[:8]}"
    known = hub.live_view.get(ParticipantRow, name)
    if known is None or known.task_id != asked.request_id:
        route = f"POST {PARTICIPANTS.path}/spawn"
        check_name_is_free(hub, name, "agent_name", asked.principal, route, is_participant=True)
        if known is not None and known.status != STOPPED:
            raise ApiError(409, ILLEGAL_TRANSITION, "an agent of this name takes part already")
    image = hub.settings.agent_mcp.spawn_image
    launch = await start_task(hub, asked, name, body.task, body.capabilities, image)
    if launch.error is not None:
        await _wait_stopped(hub, name, asked.request_id)
        raise launch.error
    return Answer(_shown(hub, name), launch.verdict)


@PARTICIPANTS.get("", Action.AGENT_READ, ParticipantsAnswer, COMMAND="agents active", CALL=_DISCOVER)
async def list_participants(hub: Hub, asked: Asked, wanted: ParticipantFilter) -> LongAnswer:
    """List participants with their keys, sorted by name; without `status` those that have not stopped.

    An answer has `limits.answer_bytes` at most; `left` is the number of further participants beyond that.
    """

    def shown(row: ParticipantRow) -> dict[str, Any]:
        return _as_json(row, hub.lists.keys_of(row.agent_name))

    rows = await asyncio.to_thread(hub.lists.participants_with, wanted.status, wanted.capability)
    return page_by_name(hub, "participants", rows, lambda row: row.agent_name, wanted, shown, TASK_TEXT_LIMIT)


@PARTICIPANTS.get("/{name}", Action.AGENT_READ, ParticipantAnswer, COMMAND="agents status")
def show_participant(hub: Hub, asked: Asked, name: AgentPath) -> dict[str, Any]:
    """Show one participant with its keys, also one that has stopped, or answer 404."""
    return _shown(hub, name)


@PARTICIPANTS.post("/{name}/stop", Action.PARTICIPANT_STOP, ParticipantAnswer, COMMAND="agents stop")
async def stop_participant(
    hub: Hub, asked: Asked, name: AgentPath, body: AgentStopRequest | None = None
) -> Answer:
    """Stop a participant: its keys become invalid, and its process ends if the gateway spawned it.

    The answer comes when the participant has stopped, or after `gateway.launch_timeout_s`. Stopping it
    again changes nothing. The answer is 404 for an unknown participant.
    """
    row = _participant(hub, name)
    if row.status == STOPPED:
        return Answer(_shown(hub, name), DUPLICATE)
    reason = "" if body is None else body.reason
    if row.task_id is None:
        stop = AgentStopped(agent_name=name, request_id=asked.request_id, reason=reason)
        record = stop.record(**asked.origin)
    else:
        # The process manager stops the participant when its task has ended.
        cancel = TaskCancellation(task_id=row.task_id, request_id=asked.request_id, reason=reason)
        record = cancel.record(**asked.origin)
    settled = await hub.appender.settle_accepted(record)
    await _wait_stopped(hub, name, row.task_id)
    return Answer(_shown(hub, name), settled.verdict)


@PARTICIPANTS.post("/{name}/keys", Action.PARTICIPANT_ADD, ParticipantAnswer)
def register_key(hub: Hub, asked: Asked, name: AgentPath, body: KeyRequest) -> AgentKeyRegistered:
    """Add a public key to a participant. Its present keys stay valid for `overlap_s` seconds.

    The answer is 404 for an unknown participant, 409 when it has stopped or has this key already, and 403
    when another agent has the key.
    """
    route = f"POST {PARTICIPANTS.path}/{{name}}/keys"
    return AgentKeyRegistered(
        agent_name=name,
        request_id=asked.request_id,
        public_key=_checked_key(hub, asked, name, body.public_key, route),
        overlap_ms=body.overlap_s * 1000,
    )


@PARTICIPANTS.post(
    "/{name}/keys/{key_id}/remove", Action.PARTICIPANT_STOP, ParticipantAnswer, COMMAND="agents remove-key"
)
def remove_key(
    hub: Hub, asked: Asked, name: AgentPath, key_id: KeyPath, body: NoFields | None = None
) -> AgentKeyRemoved:
    """Remove a public key of a participant. Calls that are signed with this key are refused at once.

    The answer is 404 for an unknown participant or key, and 409 when the participant has stopped.
    """
    return AgentKeyRemoved(agent_name=name, request_id=asked.request_id, key_id=key_id)


def _checked_key(hub: Hub, asked: Asked, agent_name: str, public_key: str, route: str) -> str:
    """Return a public key in its canonical notation.

    Raises: ApiError: The key is invalid, or another agent has it. A signature does not name its signer, so a
        shared key would let one agent sign for the other.
    """
    try:
        found = checked_public_key(public_key)
    except ValueError as error:
        raise malformed(f"public_key: {error}") from None
    known = hub.lists.keys_with(key_id_of(found))
    if any(key.public_key == found and key.agent_name != agent_name for key in known):
        raise hub.refusals.forbidden("another agent has this key", asked.principal, route)
    return found


async def _wait_stopped(hub: Hub, name: str, task_id: str | None) -> None:
    """Wait until the participant of a task has stopped, at most `gateway.launch_timeout_s`."""
    deadline = time.monotonic() + hub.settings.gateway.launch_timeout_s
    while time.monotonic() < deadline:
        row = hub.live_view.get(ParticipantRow, name)
        if row is None or row.task_id != task_id or row.status == STOPPED:
            return
        await asyncio.sleep(_POLL_S)


def participant_as_json(row: ParticipantRow) -> dict[str, Any]:
    """Return a participant's row as a JSON object for an HTTP answer. The participant's keys are not in it."""
    return row_as_answer(Participant, row, id="agent_name")


def _as_json(row: ParticipantRow, keys: list[AgentKeyRow]) -> dict[str, Any]:
    return {**participant_as_json(row), "keys": [_key_as_json(key) for key in keys]}


def _key_as_json(key: AgentKeyRow) -> dict[str, Any]:
    valid_until = None if key.valid_until is None else iso_moment(key.valid_until)
    return row_as_answer(KeyAnswer, key) | {"valid_until": valid_until}
