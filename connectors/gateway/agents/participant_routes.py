"""The hub's routes for participants: register, spawn, list, stop, and change their keys (AM-03, AM-06, AM-09).

Spawning is a task with an image: what makes it run is the task keeper's affair, and the end of the task is
the end of the participant.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query, Request, Response

from connectors.gateway.agents.agent_routes import AgentPath
from connectors.gateway.rules.hub_policy import participant_row
from connectors.gateway.rules.participant_models import (
    JoinRequest,
    KeyRequest,
    ParticipantAnswer,
    ParticipantFilter,
    ParticipantsAnswer,
    SpawnRequest,
    StopRequest,
)
from connectors.gateway.rules.xml_recipients import is_listener
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.task_tokens import task_token
from connectors.gateway.web.admission import asks_for
from connectors.gateway.web.answers import (
    ApiError,
    check_task_text,
    iso_moment,
    json_answer,
    malformed,
    not_found,
    refuse_rejected,
)
from connectors.gateway.web.idempotency import IdempotencyKey, request_uuid
from connectors.gateway.web.models import ERRORS, NoFields
from connectors.gateway.web.policy import Action
from connectors.gateway.web.refusals import DOOR
from connectors.gateway.work.task_routes import LAUNCH_FAILED, launched, never_ran, session_of, task_row
from schemas.fold import life_cycles as states
from schemas.fold.view_rows import (
    REGISTRY_KEYS,
    REGISTRY_PARTICIPANTS,
    REGISTRY_PRINCIPALS,
    AgentKeyRow,
    ParticipantRow,
    PrincipalRow,
)
from schemas.streams.agents.agent_signing import checked_public_key
from schemas.streams.agents.participants import (
    AgentJoined,
    AgentKeyRegistered,
    AgentKeyRemoved,
    AgentStopped,
    participant_record,
)
from schemas.streams.principal.principals import ACTIVE, RESERVED_PRINCIPALS, token_hash
from schemas.streams.task.task_registry import TaskCancellation, TaskStart, task_record
from schemas.wire.verdicts import DUPLICATE, ILLEGAL_TRANSITION, POLICY

PARTICIPANTS: Final = "/api/hub/participants"
_KEYS: Final = f"{PARTICIPANTS}/{{name}}/keys"
_POLL_S: Final = 0.02
KeyPath = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")]


def add_participant_routes(app: FastAPI, hub: Hub) -> None:
    """Add the routes under `/api/hub/participants`."""
    _add_arrivals(app, hub)
    _add_reads(app, hub)
    _add_stop(app, hub)
    _add_keys(app, hub)


def _add_arrivals(app: FastAPI, hub: Hub) -> None:
    @app.post(PARTICIPANTS, status_code=201, response_model=ParticipantAnswer, responses=ERRORS)
    @asks_for(Action.PARTICIPANT_ADD)
    async def register_participant(request: Request, body: JoinRequest, key: IdempotencyKey = None) -> Response:
        """Let an agent take part that runs elsewhere and signs with a key of its own."""
        check_task_text(body.task, hub.settings.limits.task_characters)
        principal = request.state.caller.principal
        _check_name(hub, body.agent_name, principal, f"POST {PARTICIPANTS}")
        joined = AgentJoined(
            agent_name=body.agent_name,
            request_id=str(request_uuid(principal, key)),
            task=body.task,
            capabilities=body.capabilities,
            public_key=_checked(hub, body.agent_name, body.public_key, principal, f"POST {PARTICIPANTS}"),
        )
        record = participant_record(joined, door=DOOR, principal=principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        return json_answer(_shown(hub, body.agent_name), 201, settled.verdict)

    @app.post(f"{PARTICIPANTS}/spawn", status_code=201, response_model=ParticipantAnswer, responses=ERRORS)
    @asks_for(Action.PARTICIPANT_ADD)
    async def spawn_participant(request: Request, body: SpawnRequest, key: IdempotencyKey = None) -> Response:
        """Start an agent with a key of its own, and wait until it runs; 502 `launch_failed` if it does not."""
        check_task_text(body.task, hub.settings.limits.task_characters)
        principal = request.state.caller.principal
        task_id = str(request_uuid(principal, key))
        name = body.agent_name or f"agent-{task_id[:8]}"
        known = participant_row(hub.live_view, name)
        if known is None or known.task_id != task_id:
            _check_name(hub, name, principal, f"POST {PARTICIPANTS}/spawn")
            if known is not None and known.status != states.STOPPED:
                raise ApiError(409, ILLEGAL_TRANSITION, "an agent of this name takes part already")
        task = task_row(hub, task_id)
        token = task_token(hub.keyring, task_id, None if task is None else task.token_id)
        start = TaskStart(
            task_id=task_id,
            request_id=task_id,
            description=body.task,
            agent_name=name,
            capabilities=body.capabilities,
            token_sha256=token_hash(token),
            expiry_ms=round(hub.settings.gateway.token_ttl_s * 1000),
            session_name=session_of(task, task_id),
            image=hub.settings.agent_mcp.spawn_image,
        )
        settled = refuse_rejected(await hub.appender.settle(task_record(start, door=DOOR, principal=principal)))
        row = await launched(hub, task_id)
        if row.status == states.FAILED and never_ran(hub, task_id):
            await _stopped(hub, name, task_id)
            raise ApiError(502, LAUNCH_FAILED, row.error or "the agent was not started")
        return json_answer(_shown(hub, name), 201, settled.verdict)


def _add_reads(app: FastAPI, hub: Hub) -> None:
    @app.get(PARTICIPANTS, response_model=ParticipantsAnswer, responses=ERRORS)
    @asks_for(Action.AGENT_READ)
    async def list_participants(wanted: Annotated[ParticipantFilter, Query()]) -> Response:
        """List who takes part, by name."""
        rows = [
            row
            for row in hub.live_view.rows(REGISTRY_PARTICIPANTS)
            if isinstance(row, ParticipantRow)
            and (row.status == wanted.status if wanted.status else row.status != states.STOPPED)
            and (wanted.capability is None or wanted.capability in row.capabilities)
        ]
        keys = _keys_by_agent(hub)
        shown = [_as_json(row, keys.get(row.agent_name, [])) for row in rows]
        return json_answer({"participants": sorted(shown, key=lambda one: one["id"])})

    @app.get(f"{PARTICIPANTS}/{{name}}", response_model=ParticipantAnswer, responses=ERRORS)
    @asks_for(Action.AGENT_READ)
    async def show_participant(name: AgentPath) -> Response:
        """Show one participant, also one that has stopped."""
        return json_answer(_shown(hub, name))


def _add_stop(app: FastAPI, hub: Hub) -> None:
    @app.post(f"{PARTICIPANTS}/{{name}}/stop", response_model=ParticipantAnswer, responses=ERRORS)
    @asks_for(Action.PARTICIPANT_STOP)
    async def stop_participant(
        request: Request, name: AgentPath, body: StopRequest | None = None, key: IdempotencyKey = None
    ) -> Response:
        """Stop an agent: its keys are worth nothing any more, and what was spawned is ended."""
        row = participant_row(hub.live_view, name)
        if row is None:
            raise not_found("no agent of this name takes part")
        if row.status == states.STOPPED:
            return json_answer(_shown(hub, name), verdict=DUPLICATE)
        principal = request.state.caller.principal
        request_id, reason = str(request_uuid(principal, key)), "" if body is None else body.reason
        if row.task_id is None:
            stop = AgentStopped(agent_name=name, request_id=request_id, reason=reason)
            record = participant_record(stop, door=DOOR, principal=principal)
        else:
            # The reactor stops it when its task has ended.
            cancel = TaskCancellation(task_id=row.task_id, request_id=request_id, reason=reason)
            record = task_record(cancel, door=DOOR, principal=principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        await _stopped(hub, name, row.task_id)
        return json_answer(_shown(hub, name), verdict=settled.verdict)


def _add_keys(app: FastAPI, hub: Hub) -> None:
    @app.post(_KEYS, response_model=ParticipantAnswer, responses=ERRORS)
    @asks_for(Action.PARTICIPANT_ADD)
    async def register_key(
        request: Request, name: AgentPath, body: KeyRequest, key: IdempotencyKey = None
    ) -> Response:
        """Give an agent a further key. The ones it has are good for a while yet."""
        principal = request.state.caller.principal
        registered = AgentKeyRegistered(
            agent_name=name,
            request_id=str(request_uuid(principal, key)),
            public_key=_checked(hub, name, body.public_key, principal, f"POST {_KEYS}"),
            overlap_ms=body.overlap_s * 1000,
        )
        record = participant_record(registered, door=DOOR, principal=principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        return json_answer(_shown(hub, name), verdict=settled.verdict)

    @app.post(f"{_KEYS}/{{key_id}}/remove", response_model=ParticipantAnswer, responses=ERRORS)
    @asks_for(Action.PARTICIPANT_STOP)
    async def remove_key(
        request: Request,
        name: AgentPath,
        key_id: KeyPath,
        body: NoFields | None = None,
        key: IdempotencyKey = None,
    ) -> Response:
        """Take a key from an agent, at once."""
        principal = request.state.caller.principal
        removed = AgentKeyRemoved(agent_name=name, request_id=str(request_uuid(principal, key)), key_id=key_id)
        record = participant_record(removed, door=DOOR, principal=principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        return json_answer(_shown(hub, name), verdict=settled.verdict)


def _check_name(hub: Hub, name: str, principal: str, route: str) -> None:
    """Raise ApiError for a name that an agent may not have: its mailbox would be another's."""
    if name in RESERVED_PRINCIPALS:
        raise malformed("agent_name: this name is reserved")
    row = hub.live_view.row(REGISTRY_PRINCIPALS, name)
    is_principal = isinstance(row, PrincipalRow) and row.status == ACTIVE
    if is_principal or is_listener(hub, name):
        why = "a principal has this name" if is_principal else "a listener has this name"
        hub.refusals.record(POLICY, why, principal, route)
        raise ApiError(403, POLICY, why)


def _checked(hub: Hub, agent_name: str, public_key: str, principal: str, route: str) -> str:
    """The key in its one notation. Raises ApiError for what is none, or is another agent's: what is signed with
    it would be good for both, because a signature does not say whose it is.
    """
    try:
        found = checked_public_key(public_key)
    except ValueError as error:
        raise malformed(f"public_key: {error}") from None
    for name, keys in _keys_by_agent(hub).items():
        if name != agent_name and any(key.public_key == found for key in keys):
            why = "another agent has this key"
            hub.refusals.record(POLICY, why, principal, route)
            raise ApiError(403, POLICY, why)
    return found


async def _stopped(hub: Hub, name: str, task_id: str | None) -> None:
    """Wait until the participant of this task is said to have stopped, for as long as a launch may take."""
    deadline = time.monotonic() + hub.settings.gateway.launch_timeout_s
    while time.monotonic() < deadline:
        row = participant_row(hub.live_view, name)
        if row is None or row.task_id != task_id or row.status == states.STOPPED:
            return
        await asyncio.sleep(_POLL_S)


def _keys_by_agent(hub: Hub) -> dict[str, list[AgentKeyRow]]:
    found: dict[str, list[AgentKeyRow]] = {}
    for row in hub.live_view.rows(REGISTRY_KEYS):
        if isinstance(row, AgentKeyRow) and row.status == ACTIVE:
            found.setdefault(row.agent_name, []).append(row)
    return found


def _shown(hub: Hub, name: str) -> dict[str, Any]:
    row = participant_row(hub.live_view, name)
    if row is None:
        raise not_found("no agent of this name takes part")
    return _as_json(row, _keys_by_agent(hub).get(name, []))


def participant_as_json(row: ParticipantRow) -> dict[str, Any]:
    """Return a participant as the hub shows it, without its keys."""
    return {
        "id": row.agent_name,
        "task": row.task,
        "status": row.status,
        "capabilities": row.capabilities,
        "task_id": row.task_id,
        "started_at": iso_moment(row.started_at),
        "updated_at": iso_moment(row.updated_at),
        "stopped_at": None if row.stopped_at is None else iso_moment(row.stopped_at),
        "stopped_why": row.stopped_why,
    }


def _as_json(row: ParticipantRow, keys: list[AgentKeyRow]) -> dict[str, Any]:
    return participant_as_json(row) | {
        "keys": [
            {
                "key_id": key.key_id,
                "registered_at": iso_moment(key.registered_at),
                "valid_until": None if key.valid_until is None else iso_moment(key.valid_until),
            }
            for key in sorted(keys, key=lambda key: key.registered_at)
        ],
    }
