"""The operations of tasks (HH-03, HH-04) and their tokens (HH-02): submit, list, end, revoke.

`start_task` appends the record of a new task, and waits for the task's agent.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

from fastapi import Path

from connectors.hub.engine.family import ROW_BYTES, Family, LongAnswer, page_by_age
from connectors.hub.engine.operation import Answer, Asked
from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import TOKEN_LISTS, OrderedRows, task_lists
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailboxes import token_mailbox
from connectors.hub.services.task_keeper import container_of
from connectors.hub.serving.answers import ApiError, check_task_text, existing, not_found, row_as_answer
from connectors.hub.serving.identities import request_uuid, task_token
from connectors.hub.serving.models import NAMED
from connectors.hub.serving.policy import Action
from connectors.operations.rules.agent_models import (
    SubmittedAnswer,
    TaskAnswer,
    TaskCancelRequest,
    TaskCompletionRequest,
    TaskFailureRequest,
    TaskFilter,
    TaskRequest,
    TasksAnswer,
    TokenAnswer,
    TokenFilter,
    TokensAnswer,
)
from connectors.operations.rules.hub_policy import evaluate_task_assignment
from connectors.operations.rules.owners import owner_of_task_in_path, submitter_of_token
from schemas.fold import stream_kind as states
from schemas.streams.agents.agent_registry import DEFINED, AgentRow
from schemas.streams.container.containers import MONITORING, ContainerRow
from schemas.streams.principal.principals import ACTIVE, REVOKED, token_hash
from schemas.streams.task.task_registry import (
    FAILED,
    RESULT_LIMIT_BYTES,
    TASK_TERMINAL,
    TaskCancellation,
    TaskCompletion,
    TaskFailure,
    TaskRow,
    TaskStart,
    TokenRevocation,
    TokenRow,
    result_text,
    result_value,
)
from trunkline_agent.wire.verdicts import POLICY

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


# The text of a task, and its result.
_TASK_BYTES: Final = 2 * RESULT_LIMIT_BYTES
EXPIRED: Final = "expired"
TaskPath = Annotated[str, Path(**NAMED, description="Id of the task.")]
TokenPath = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$", description="Id of the token, 12 hex digits.")]


def _task_shown(hub: Hub, task_id: str) -> dict[str, Any]:
    return _task_as_json(existing(hub.live_view.get(TaskRow, task_id), "no task with this id"))


def _token_shown(hub: Hub, token_id: str) -> dict[str, Any]:
    row = existing(hub.live_view.get(TokenRow, token_id), "no token with this id")
    return _token_as_json(row, hub.log_clock.now_us())


TASKS: Final = Family("/api/hub/tasks", _task_shown, "task_id", owner_of_task_in_path)
TOKENS: Final = Family("/api/hub/tokens", _token_shown, "token_id", submitter_of_token)


@TASKS.post("", Action.TASK_SUBMIT, SubmittedAnswer, STATUS=201)
async def submit_task(hub: Hub, asked: Asked, body: TaskRequest) -> Answer:
    """Give an agent a task, start the agent, and answer when it runs.

    The answer contains the task and its token. It comes after `gateway.launch_timeout_s` even if the agent
    does not run yet. It is 502 `launch_failed` when the agent cannot be started, 404 for an unknown agent,
    and 403 when a policy forbids the task.
    """
    check_task_text(body.description, hub.settings.limits.task_characters)
    known = hub.live_view.get(TaskRow, asked.request_id)
    # For a known key the fold reports other content as a conflict. An empty description is always refused.
    if known is None or not body.description:
        _check_policy(hub, asked, body)
    capabilities = _capabilities(hub.live_view, known, body.agent_name)
    launch = await start_task(hub, asked, body.agent_name, body.description, capabilities)
    if launch.error is not None:
        raise launch.error
    answer = {
        "task": _task_as_json(launch.task),
        "token": launch.token,
        "url": hub.settings.gateway_url,
        "mailbox": _mailbox_of(hub, launch.task),
    }
    return Answer(answer, launch.verdict)


def _check_policy(hub: Hub, asked: Asked, body: TaskRequest) -> None:
    decision = evaluate_task_assignment(hub.live_view, body.agent_name, body.description)
    if decision.allowed:
        return
    agent = hub.live_view.get(AgentRow, body.agent_name)
    if agent is None or agent.status != DEFINED:
        hub.refusals.record(POLICY, decision.reason, asked.principal, f"POST {TASKS.path}")
        raise not_found(decision.reason)
    raise hub.refusals.forbidden(decision.reason, asked.principal, f"POST {TASKS.path}")


def _mailbox_of(hub: Hub, row: TaskRow) -> str:
    if hub.settings.gateway.mailbox_per_token and row.token_id is not None:
        return token_mailbox(row.agent_name, row.token_id)
    return row.agent_name


def _capabilities(live_view: LiveView, known: TaskRow | None, agent_name: str) -> list[str]:
    """Return the capabilities of the repeated request's token, else those of the agent's definition."""
    token = None if known is None or known.token_id is None else live_view.get(TokenRow, known.token_id)
    source = token or live_view.get(AgentRow, agent_name)
    return [] if source is None else source.capabilities


def _request_id(asked: Asked) -> str:
    """Return an id from the principal's name alone.

    So a request that is repeated over an upgrade keeps its id. Each task has a stream of its own, so the ids of
    two tasks do not collide.
    """
    return str(request_uuid(asked.principal, asked.key))


@TASKS.post("/{task_id}/complete", Action.TASK_END, TaskAnswer)
def complete_task(
    hub: Hub, asked: Asked, task_id: TaskPath, body: TaskCompletionRequest | None = None
) -> TaskCompletion:
    """End a task as completed, with its result. The gateway revokes its token and stops its agent.

    The answer is the task, 404 if it is unknown, or 409 if it does not run.
    """
    result = result_text("" if body is None else body.result)
    return TaskCompletion(task_id=task_id, request_id=_request_id(asked), result=result)


@TASKS.post("/{task_id}/fail", Action.TASK_END, TaskAnswer, COMMAND="tasks fail")
def fail_task(hub: Hub, asked: Asked, task_id: TaskPath, body: TaskFailureRequest) -> TaskFailure:
    """End a task as failed, with a reason. The gateway revokes its token and stops its agent.

    The answer is the task, 404 if it is unknown, or 409 if it does not run.
    """
    return TaskFailure(task_id=task_id, request_id=_request_id(asked), error=body.error)


@TASKS.post("/{task_id}/cancel", Action.TASK_CANCEL, TaskAnswer, COMMAND="tasks cancel")
def cancel_task(
    hub: Hub, asked: Asked, task_id: TaskPath, body: TaskCancelRequest | None = None
) -> TaskCancellation:
    """Cancel a task that has not ended. The gateway revokes its token and stops its agent.

    The answer is the task, 404 if it is unknown, or 409 if it has ended.
    """
    reason = "" if body is None else body.reason
    return TaskCancellation(task_id=task_id, request_id=_request_id(asked), reason=reason)


@TASKS.delete("/{task_id}", Action.TASK_CANCEL, TaskAnswer)
def delete_task(hub: Hub, asked: Asked, task_id: TaskPath) -> TaskCancellation:
    """Cancel a task that has not ended. Nothing is deleted: the task and its records are kept.

    The answer is the task, 404 if it is unknown, or 409 if it has ended.
    """
    return TaskCancellation(task_id=task_id, request_id=_request_id(asked))


@TASKS.get("", Action.TASK_READ, TasksAnswer, COMMAND="tasks list")
def list_tasks(hub: Hub, asked: Asked, wanted: TaskFilter) -> LongAnswer:
    """List the tasks that match every given filter (status, agent), newest first.

    An answer has `limits.answer_bytes` at most; `left` is the number of older tasks beyond that.
    """
    lists = task_lists(wanted.status, wanted.agent_name)
    return page_by_age(hub, "tasks", hub.lists.tasks, lists, wanted.limit, _task_as_json, _TASK_BYTES)


@TASKS.get("/{task_id}", Action.TASK_READ, TaskAnswer, COMMAND="tasks show")
def show_task(hub: Hub, asked: Asked, task_id: TaskPath) -> dict[str, Any]:
    """Show one task with its status and result, or answer 404."""
    return _task_shown(hub, task_id)


@TOKENS.get("", Action.TOKEN_LIST, TokensAnswer, COMMAND="tokens list")
def list_tokens(hub: Hub, asked: Asked, wanted: TokenFilter) -> LongAnswer:
    """List the tokens of tasks, newest first: id, status and expiry, but not the token itself."""
    now_us = hub.log_clock.now_us()
    return LongAnswer(wanted.limit * ROW_BYTES, partial(_tokens, hub.lists.tokens, wanted, now_us))


@TOKENS.post("/{token_id}/revoke", Action.TOKEN_REVOKE, TokenAnswer, COMMAND="tokens revoke")
def revoke_token(
    hub: Hub, asked: Asked, token_id: TokenPath, body: TaskCancelRequest | None = None
) -> TokenRevocation:
    """Revoke the token of a task, which goes on without it. Revoking it again changes nothing.

    The answer is the token's row, or 404 for an unknown token.
    """
    row = existing(hub.live_view.get(TokenRow, token_id), "no token with this id")
    return TokenRevocation(
        task_id=row.task_id,
        token_id=token_id,
        request_id=asked.request_id,
        reason="" if body is None else body.reason,
    )


def _task_as_json(row: TaskRow) -> dict[str, Any]:
    result = None if row.result is None else result_value(row.result)
    return row_as_answer(TaskAnswer, row, id="task_id") | {"result": result}


def _token_as_json(row: TokenRow, now_us: int) -> dict[str, Any]:
    return row_as_answer(TokenAnswer, row) | {"status": _token_status(row, now_us)}


def _token_status(row: TokenRow, now_us: int) -> str:
    return EXPIRED if row.status == ACTIVE and row.expiry * 1000 <= now_us else row.status


def _tokens(tokens: OrderedRows[TokenRow], wanted: TokenFilter, now_us: int) -> dict[str, Any]:
    if wanted.status in (ACTIVE, EXPIRED):
        # Tokens are revoked at the end of their tasks, so few are in this group.
        rows = [row for row in tokens.newest([ACTIVE]) if _token_status(row, now_us) == wanted.status]
        total = len(rows)
    else:
        lists = TOKEN_LISTS if wanted.status is None else (REVOKED,)
        rows, total = tokens.newest(lists, wanted.limit), tokens.count(lists)
    return {"tokens": [_token_as_json(row, now_us) for row in rows[: wanted.limit]], "total": total}
