"""The HTTP routes for participants: register, spawn, list, stop, and change keys (AM-03, AM-06, AM-09).

Spawning an agent starts a task with an image. The task keeper runs it, and the participant ends with the task.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request, Response

from connectors.gateway.agents.agent_routes import AgentPath
from connectors.gateway.messages.shown_messages import list_page
from connectors.gateway.rules.free_names import check_name_is_free
from connectors.gateway.rules.participant_models import (
    AgentStopRequest,
    JoinRequest,
    KeyAnswer,
    KeyRequest,
    Participant,
    ParticipantAnswer,
    ParticipantFilter,
    ParticipantsAnswer,
    SpawnRequest,
)
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import (
    ApiError,
    check_task_text,
    existing,
    json_answer,
    malformed,
    row_as_answer,
)
from connectors.gateway.web.idempotency import Write, WriteRequest, caller_of
from connectors.gateway.web.models import NoFields
from connectors.gateway.web.policy import Action
from connectors.gateway.work.task_launch import start_task
from connectors.live.live_view import LiveView
from schemas.fold.life_cycles import STOPPED
from schemas.streams.agents.participants import (
    AgentJoined,
    AgentKeyRegistered,
    AgentKeyRemoved,
    AgentKeyRow,
    AgentStopped,
    ParticipantRow,
    participant_record,
)
from schemas.streams.task.task_registry import TaskCancellation, task_record
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import TASK_TEXT_LIMIT
from trunkline_agent.mcp.signing import checked_public_key
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.public_keys import key_id_of
from trunkline_agent.wire.verdicts import DUPLICATE, ILLEGAL_TRANSITION

PARTICIPANTS: Final = "/api/hub/participants"
_KEYS: Final = f"{PARTICIPANTS}/{{name}}/keys"
_POLL_S: Final = 0.02
KeyPath = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$", description="Id of the key, 16 hex digits.")]


def add_participant_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that register, spawn, list and stop participants, and change their keys.

    Called once, when the gateway starts. The paths begin with `/api/hub/participants`. The routes read from
    `hub` and append records through it.
    """
    _add_arrivals(routes, hub)
    _add_reads(routes, hub)
    _add_stop(routes, hub)
    _add_keys(routes, hub)


def _add_arrivals(routes: Routes, hub: Hub) -> None:
    @routes.post(PARTICIPANTS, Action.PARTICIPANT_ADD, ParticipantAnswer, status_code=201)
    async def register_participant(write: WriteRequest, body: JoinRequest) -> Response:
        """Register an agent that runs outside Trunkline and signs its calls with its own private key.

        The body has the agent's public key. The answer is 403 when another agent has this key, or when a
        principal or listener has the name. It is 409 when a participant of this name has not stopped.
        """
        check_task_text(body.task, hub.settings.limits.task_characters)
        route = f"POST {PARTICIPANTS}"
        check_name_is_free(hub, body.agent_name, "agent_name", write.principal, route, is_participant=True)
        joined = AgentJoined(
            agent_name=body.agent_name,
            request_id=write.request_id,
            task=body.task,
            capabilities=body.capabilities,
            public_key=_checked_key(hub, write, body.agent_name, body.public_key, route),
        )
        return await _change(hub, write, body.agent_name, joined, 201)

    @routes.post(f"{PARTICIPANTS}/spawn", Action.PARTICIPANT_ADD, ParticipantAnswer, status_code=201)
    async def spawn_participant(write: WriteRequest, body: SpawnRequest) -> Response:
        """Start an agent with a new key, register it as a participant, and wait until it runs.

        Without a name in the body, the gateway chooses one. The answer is 502 `launch_failed` when the agent
        cannot be started, and 409 when a participant of this name has not stopped.
        """
        check_task_text(body.task, hub.settings.limits.task_characters)
        name = body.agent_name or f"agent-{write.request_id[:8]}"
        known = hub.live_view.get(ParticipantRow, name)
        if known is None or known.task_id != write.request_id:
            route = f"POST {PARTICIPANTS}/spawn"
            check_name_is_free(hub, name, "agent_name", write.principal, route, is_participant=True)
            if known is not None and known.status != STOPPED:
                raise ApiError(409, ILLEGAL_TRANSITION, "an agent of this name takes part already")
        image = hub.settings.agent_mcp.spawn_image
        launch = await start_task(hub, write, name, body.task, body.capabilities, image)
        if launch.error is not None:
            await _wait_stopped(hub, name, write.request_id)
            raise launch.error
        return json_answer(_shown(hub, name), 201, launch.verdict)


def _add_reads(routes: Routes, hub: Hub) -> None:
    @routes.get(PARTICIPANTS, Action.AGENT_READ, ParticipantsAnswer)
    async def list_participants(request: Request, wanted: Annotated[ParticipantFilter, Query()]) -> Response:
        """List participants with their keys, sorted by name; without `status` those that have not stopped.

        An answer has `limits.answer_bytes` at most; `left` is the number of further participants beyond that.
        """
        rows = await asyncio.to_thread(hub.lists.participants_with, wanted.status, wanted.capability)
        shown, left = await list_page(
            hub,
            caller_of(request).principal,
            rows,
            lambda row: row.agent_name,
            lambda row: _as_json(row, hub.lists.keys_of(row.agent_name)),
            wanted.after,
            TASK_TEXT_LIMIT,
        )
        return json_answer({"participants": shown, "left": left})

    @routes.get(f"{PARTICIPANTS}/{{name}}", Action.AGENT_READ, ParticipantAnswer)
    async def show_participant(name: AgentPath) -> Response:
        """Show one participant with its keys, also one that has stopped, or answer 404."""
        return json_answer(_shown(hub, name))


def _add_stop(routes: Routes, hub: Hub) -> None:
    @routes.post(f"{PARTICIPANTS}/{{name}}/stop", Action.PARTICIPANT_STOP, ParticipantAnswer)
    async def stop_participant(
        write: WriteRequest, name: AgentPath, body: AgentStopRequest | None = None
    ) -> Response:
        """Stop a participant: its keys become invalid, and its process ends if the gateway spawned it.

        The answer comes when the participant has stopped, or after `gateway.launch_timeout_s`. Stopping it
        again changes nothing. The answer is 404 for an unknown participant.
        """
        row = _participant(hub.live_view, name)
        if row.status == STOPPED:
            return json_answer(_shown(hub, name), verdict=DUPLICATE)
        reason = "" if body is None else body.reason
        record: OutgoingRecord
        if row.task_id is None:
            stop = AgentStopped(agent_name=name, request_id=write.request_id, reason=reason)
            record = participant_record(stop, **write.origin)
        else:
            # The process manager stops the participant when its task has ended.
            cancel = TaskCancellation(task_id=row.task_id, request_id=write.request_id, reason=reason)
            record = task_record(cancel, **write.origin)
        settled = await hub.appender.settle_accepted(record)
        await _wait_stopped(hub, name, row.task_id)
        return json_answer(_shown(hub, name), verdict=settled.verdict)


def _add_keys(routes: Routes, hub: Hub) -> None:
    @routes.post(_KEYS, Action.PARTICIPANT_ADD, ParticipantAnswer)
    async def register_key(write: WriteRequest, name: AgentPath, body: KeyRequest) -> Response:
        """Add a public key to a participant. Its present keys stay valid for `overlap_s` seconds.

        The answer is 404 for an unknown participant, 409 when it has stopped or has this key already, and 403
        when another agent has the key.
        """
        registered = AgentKeyRegistered(
            agent_name=name,
            request_id=write.request_id,
            public_key=_checked_key(hub, write, name, body.public_key, f"POST {_KEYS}"),
            overlap_ms=body.overlap_s * 1000,
        )
        return await _change(hub, write, name, registered)

    @routes.post(f"{_KEYS}/{{key_id}}/remove", Action.PARTICIPANT_STOP, ParticipantAnswer)
    async def remove_key(
        write: WriteRequest, name: AgentPath, key_id: KeyPath, body: NoFields | None = None
    ) -> Response:
        """Remove a public key of a participant. Calls that are signed with this key are refused at once.

        The answer is 404 for an unknown participant or key, and 409 when the participant has stopped.
        """
        removed = AgentKeyRemoved(agent_name=name, request_id=write.request_id, key_id=key_id)
        return await _change(hub, write, name, removed)


async def _change(
    hub: Hub,
    write: Write,
    name: str,
    body: AgentJoined | AgentKeyRegistered | AgentKeyRemoved,
    status: int = 200,
) -> Response:
    settled = await hub.appender.settle_accepted(participant_record(body, **write.origin))
    return json_answer(_shown(hub, name), status, settled.verdict)


def _checked_key(hub: Hub, write: Write, agent_name: str, public_key: str, route: str) -> str:
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
        raise hub.refusals.forbidden("another agent has this key", write.principal, route)
    return found


async def _wait_stopped(hub: Hub, name: str, task_id: str | None) -> None:
    """Wait until the participant of a task has stopped, at most `gateway.launch_timeout_s`."""
    deadline = time.monotonic() + hub.settings.gateway.launch_timeout_s
    while time.monotonic() < deadline:
        row = hub.live_view.get(ParticipantRow, name)
        if row is None or row.task_id != task_id or row.status == STOPPED:
            return
        await asyncio.sleep(_POLL_S)


def _participant(live_view: LiveView, name: str) -> ParticipantRow:
    return existing(live_view.get(ParticipantRow, name), "no agent of this name takes part")


def _shown(hub: Hub, name: str) -> dict[str, Any]:
    return _as_json(_participant(hub.live_view, name), hub.lists.keys_of(name))


def participant_as_json(row: ParticipantRow) -> dict[str, Any]:
    """Return a participant's row as a JSON object for an HTTP answer. The participant's keys are not in it."""
    return row_as_answer(Participant, row, id="agent_name")


def _as_json(row: ParticipantRow, keys: list[AgentKeyRow]) -> dict[str, Any]:
    return {**participant_as_json(row), "keys": [_key_as_json(key) for key in keys]}


def _key_as_json(key: AgentKeyRow) -> dict[str, Any]:
    valid_until = None if key.valid_until is None else iso_moment(key.valid_until)
    return row_as_answer(KeyAnswer, key) | {"valid_until": valid_until}
