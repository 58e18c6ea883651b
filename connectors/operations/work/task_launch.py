"""A function that starts a task: it appends the record, and waits for the task's agent."""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

from connectors.hub.engine.operation import Asked
from connectors.hub.services.hub import Hub
from connectors.hub.services.task_keeper import container_of
from connectors.hub.serving.answers import ApiError, existing
from connectors.hub.serving.identities import task_token
from schemas.fold import life_cycles as states
from schemas.streams.container.container_registry import MONITORING, ContainerRow
from schemas.streams.principal.principals import token_hash
from schemas.streams.task.task_registry import FAILED, TASK_TERMINAL, TaskRow, TaskStart

LAUNCH_FAILED: Final = "launch_failed"
_POLL_S: Final = 0.02


class Launch(NamedTuple):
    """The result of `start_task`: the task that was started, whether or not its agent runs.

    Attributes:
        task: The row of the task.
        token: The token with which the task's agent calls the hub.
        verdict: The verdict on the record that started the task: accepted or duplicate.
        error: The 502 error for the caller to raise, when the agent could not be started. Otherwise None: the
            agent runs or has ended, or `gateway.launch_timeout_s` was over. The status in `task` tells these
            apart.
    """

    task: TaskRow
    token: str
    verdict: str
    error: ApiError | None


async def start_task(
    hub: Hub,
    asked: Asked,
    agent_name: str,
    description: str,
    capabilities: list[str],
    image: str | None = None,
) -> Launch:
    """Start a task, and wait until its agent runs, the task has ended, or `gateway.launch_timeout_s` is over.

    Args:
        hub: The hub, with the live view, the keyring and the appender.
        asked: The request. Its id becomes the id of the task, so a repeated request starts no second task.
        agent_name: The agent of the task.
        description: The text of the task.
        capabilities: The capabilities of the task's token.
        image: The image of an agent to spawn; None for the image of the agent's definition.

    Returns:
        The task and its token. `error` of the result is set when the agent could not be started; the caller
        raises that error.

    Raises:
        ApiError: The fold rejected the record that starts the task.
        BackboneUnreachable: Kafka is unreachable.
    """
    task_id = asked.request_id
    known = hub.live_view.get(TaskRow, task_id)
    token = task_token(hub.keyring, task_id, None if known is None else known.token_id)
    start = TaskStart(
        task_id=task_id,
        request_id=task_id,
        description=description,
        agent_name=agent_name,
        capabilities=capabilities,
        token_sha256=token_hash(token),
        expiry_ms=round(hub.settings.gateway.token_ttl_s * 1000),
        # The name is part of the record's content, so a repeated request must have that of the first one.
        session_name=container_of(task_id) if known is None else known.session_name,
        image=image,
    )
    settled = await hub.appender.settle_accepted(start.record(**asked.origin))
    row = await _launched(hub, task_id)
    error = None
    if row.status == FAILED:
        container = hub.live_view.get(ContainerRow, container_of(task_id))
        if container is None or container.handle is None:
            error = ApiError(502, LAUNCH_FAILED, row.error or "the agent was not started")
    return Launch(row, token, settled.verdict, error)


async def _launched(hub: Hub, task_id: str) -> TaskRow:
    deadline = time.monotonic() + hub.settings.gateway.launch_timeout_s
    while True:
        row = existing(hub.live_view.get(TaskRow, task_id), "no task with this id")
        container = hub.live_view.get(ContainerRow, container_of(task_id))
        runs = container is not None and container.state in (states.RUNNING, MONITORING)
        if runs or row.status in TASK_TERMINAL or time.monotonic() > deadline:
            return row
        await asyncio.sleep(_POLL_S)
