"""The HTTP routes for tasks (HH-03, HH-04) and their tokens (HH-02): submit, list, end, revoke."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request, Response

from connectors.gateway.engine.operation import reserve_bytes
from connectors.gateway.rules.hub_models import (
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
from connectors.gateway.rules.hub_policy import evaluate_task_assignment
from connectors.gateway.rules.owners import owner_of_task_in_path, submitter_of_token
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import token_mailbox
from connectors.gateway.services.ordered_rows import OrderedRows
from connectors.gateway.services.row_lists import TOKEN_LISTS, task_lists
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import (
    check_task_text,
    encoded_within,
    existing,
    json_answer,
    not_found,
    row_as_answer,
)
from connectors.gateway.web.idempotency import Write, WriteRequest, caller_of, request_uuid
from connectors.gateway.web.models import NAME_PATTERN
from connectors.gateway.web.policy import Action
from connectors.gateway.work.task_launch import start_task
from connectors.live.live_view import LiveView
from schemas.streams.agents.agent_registry import DEFINED, AgentRow
from schemas.streams.principal.principals import ACTIVE, REVOKED
from schemas.streams.task.task_registry import (
    RESULT_LIMIT_BYTES,
    TaskCancellation,
    TaskCompletion,
    TaskFailure,
    TaskRow,
    TokenRevocation,
    TokenRow,
    result_text,
    result_value,
    task_record,
)
from trunkline_agent.wire.ids import NAME_LIMIT
from trunkline_agent.wire.verdicts import POLICY

TASKS: Final = "/api/hub/tasks"
# The text of a task, and its result.
_TASK_BYTES: Final = 2 * RESULT_LIMIT_BYTES
TOKENS: Final = "/api/hub/tokens"
EXPIRED: Final = "expired"

TaskPath = Annotated[str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT, description="Id of the task.")]
TokenPath = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$", description="Id of the token, 12 hex digits.")]


def add_task_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that submit, list, show and end tasks, and revoke their tokens.

    Called once, when the gateway starts. The paths begin with `/api/hub/tasks` and `/api/hub/tokens`. The
    routes read from `hub` and append records through it.
    """
    _add_submission(routes, hub)
    _add_endings(routes, hub)
    _add_task_reads(routes, hub)
    _add_tokens(routes, hub)


def _add_submission(routes: Routes, hub: Hub) -> None:
    @routes.post(TASKS, Action.TASK_SUBMIT, SubmittedAnswer, status_code=201)
    async def submit_task(write: WriteRequest, body: TaskRequest) -> Response:
        """Give an agent a task, start the agent, and answer when it runs.

        The answer contains the task and its token. It comes after `gateway.launch_timeout_s` even if the agent
        does not run yet. It is 502 `launch_failed` when the agent cannot be started, 404 for an unknown agent,
        and 403 when a policy forbids the task.
        """
        check_task_text(body.description, hub.settings.limits.task_characters)
        known = hub.live_view.get(TaskRow, write.request_id)
        # For a known key the fold reports other content as a conflict. An empty description is always refused.
        if known is None or not body.description:
            _check_policy(hub, write, body)
        capabilities = _capabilities(hub.live_view, known, body.agent_name)
        launch = await start_task(hub, write, body.agent_name, body.description, capabilities)
        if launch.error is not None:
            raise launch.error
        answer = {
            "task": _task_as_json(launch.task),
            "token": launch.token,
            "url": hub.settings.gateway_url,
            "mailbox": _mailbox_of(hub, launch.task),
        }
        return json_answer(answer, 201, launch.verdict)


def _check_policy(hub: Hub, write: Write, body: TaskRequest) -> None:
    decision = evaluate_task_assignment(hub.live_view, body.agent_name, body.description)
    if decision.allowed:
        return
    agent = hub.live_view.get(AgentRow, body.agent_name)
    if agent is None or agent.status != DEFINED:
        hub.refusals.record(POLICY, decision.reason, write.principal, f"POST {TASKS}")
        raise not_found(decision.reason)
    raise hub.refusals.forbidden(decision.reason, write.principal, f"POST {TASKS}")


def _mailbox_of(hub: Hub, row: TaskRow) -> str:
    if hub.settings.gateway.mailbox_per_token and row.token_id is not None:
        return token_mailbox(row.agent_name, row.token_id)
    return row.agent_name


def _capabilities(live_view: LiveView, known: TaskRow | None, agent_name: str) -> list[str]:
    """Return the capabilities of the repeated request's token, else those of the agent's definition."""
    token = None if known is None or known.token_id is None else live_view.get(TokenRow, known.token_id)
    source = token or live_view.get(AgentRow, agent_name)
    return [] if source is None else source.capabilities


def _add_endings(routes: Routes, hub: Hub) -> None:
    owner = owner_of_task_in_path(hub)

    def request_id(write: Write) -> str:
        # From the name alone, unlike `write.request_id`, so that a request repeated over an upgrade keeps its
        # id. Each task has a stream of its own, so the ids of two tasks do not collide.
        return str(request_uuid(write.principal, write.key))

    async def end(write: Write, body: TaskCompletion | TaskFailure | TaskCancellation) -> Response:
        settled = await hub.appender.settle_accepted(task_record(body, **write.origin))
        row = hub.live_view.get(TaskRow, body.task_id)
        return json_answer(None if row is None else _task_as_json(row), verdict=settled.verdict)

    @routes.post(f"{TASKS}/{{task_id}}/complete", Action.TASK_END, TaskAnswer, owner)
    async def complete_task(
        write: WriteRequest, task_id: TaskPath, body: TaskCompletionRequest | None = None
    ) -> Response:
        """End a task as completed, with its result. The gateway revokes its token and stops its agent.

        The answer is the task, 404 if it is unknown, or 409 if it does not run.
        """
        result = result_text("" if body is None else body.result)
        return await end(write, TaskCompletion(task_id=task_id, request_id=request_id(write), result=result))

    @routes.post(f"{TASKS}/{{task_id}}/fail", Action.TASK_END, TaskAnswer, owner)
    async def fail_task(write: WriteRequest, task_id: TaskPath, body: TaskFailureRequest) -> Response:
        """End a task as failed, with a reason. The gateway revokes its token and stops its agent.

        The answer is the task, 404 if it is unknown, or 409 if it does not run.
        """
        return await end(write, TaskFailure(task_id=task_id, request_id=request_id(write), error=body.error))

    @routes.post(f"{TASKS}/{{task_id}}/cancel", Action.TASK_CANCEL, TaskAnswer, owner)
    async def cancel_task(
        write: WriteRequest, task_id: TaskPath, body: TaskCancelRequest | None = None
    ) -> Response:
        """Cancel a task that has not ended. The gateway revokes its token and stops its agent.

        The answer is the task, 404 if it is unknown, or 409 if it has ended.
        """
        reason = "" if body is None else body.reason
        return await end(write, TaskCancellation(task_id=task_id, request_id=request_id(write), reason=reason))

    @routes.delete(f"{TASKS}/{{task_id}}", Action.TASK_CANCEL, TaskAnswer, owner)
    async def delete_task(write: WriteRequest, task_id: TaskPath) -> Response:
        """Cancel a task that has not ended. Nothing is deleted: the task and its records are kept.

        The answer is the task, 404 if it is unknown, or 409 if it has ended.
        """
        return await end(write, TaskCancellation(task_id=task_id, request_id=request_id(write)))


def _add_task_reads(routes: Routes, hub: Hub) -> None:
    @routes.get(TASKS, Action.TASK_READ, TasksAnswer)
    async def list_tasks(request: Request, wanted: Annotated[TaskFilter, Query()]) -> Response:
        """List the tasks that match every given filter (status, agent), newest first.

        An answer has `limits.answer_bytes` at most; `left` is the number of older tasks beyond that.
        """
        most = hub.settings.limits.answer_bytes
        await reserve_bytes(hub, caller_of(request).principal, min(most, wanted.limit * _TASK_BYTES))
        return json_answer(await asyncio.to_thread(_tasks, hub.lists.tasks, wanted, most))

    @routes.get(f"{TASKS}/{{task_id}}", Action.TASK_READ, TaskAnswer, owner_of_task_in_path(hub))
    async def show_task(task_id: TaskPath) -> Response:
        """Show one task with its status and result, or answer 404."""
        row = existing(hub.live_view.get(TaskRow, task_id), "no task with this id")
        return json_answer(_task_as_json(row))


def _add_tokens(routes: Routes, hub: Hub) -> None:
    @routes.get(TOKENS, Action.TOKEN_LIST, TokensAnswer)
    async def list_tokens(wanted: Annotated[TokenFilter, Query()]) -> Response:
        """List the tokens of tasks, newest first: id, status and expiry, but not the token itself."""
        now_us = hub.log_clock.now_us()
        return json_answer(await asyncio.to_thread(_tokens, hub.lists.tokens, wanted, now_us))

    @routes.post(f"{TOKENS}/{{token_id}}/revoke", Action.TOKEN_REVOKE, TokenAnswer, submitter_of_token(hub))
    async def revoke_token(
        write: WriteRequest, token_id: TokenPath, body: TaskCancelRequest | None = None
    ) -> Response:
        """Revoke the token of a task, which goes on without it. Revoking it again changes nothing.

        The answer is the token's row, or 404 for an unknown token.
        """
        row = existing(hub.live_view.get(TokenRow, token_id), "no token with this id")
        revocation = TokenRevocation(
            task_id=row.task_id,
            token_id=token_id,
            request_id=write.request_id,
            reason="" if body is None else body.reason,
        )
        settled = await hub.appender.settle_accepted(task_record(revocation, **write.origin))
        shown = _token_as_json(hub.live_view.get(TokenRow, token_id) or row, hub.log_clock.now_us())
        return json_answer(shown, verdict=settled.verdict)


def _task_as_json(row: TaskRow) -> dict[str, Any]:
    result = None if row.result is None else result_value(row.result)
    return row_as_answer(TaskAnswer, row, id="task_id") | {"result": result}


def _token_as_json(row: TokenRow, now_us: int) -> dict[str, Any]:
    return row_as_answer(TokenAnswer, row) | {"status": _token_status(row, now_us)}


def _token_status(row: TokenRow, now_us: int) -> str:
    return EXPIRED if row.status == ACTIVE and row.expiry * 1000 <= now_us else row.status


def _tasks(tasks: OrderedRows[TaskRow], wanted: TaskFilter, most: int) -> dict[str, Any]:
    lists = task_lists(wanted.status, wanted.agent_name)
    rows = tasks.newest(lists, wanted.limit)
    shown = encoded_within(map(_task_as_json, rows), most)
    return {"tasks": shown, "total": tasks.count(lists), "left": len(rows) - len(shown)}


def _tokens(tokens: OrderedRows[TokenRow], wanted: TokenFilter, now_us: int) -> dict[str, Any]:
    if wanted.status in (ACTIVE, EXPIRED):
        # Tokens are revoked at the end of their tasks, so few are in this group.
        rows = [row for row in tokens.newest([ACTIVE]) if _token_status(row, now_us) == wanted.status]
        total = len(rows)
    else:
        lists = TOKEN_LISTS if wanted.status is None else (REVOKED,)
        rows, total = tokens.newest(lists, wanted.limit), tokens.count(lists)
    return {"tokens": [_token_as_json(row, now_us) for row in rows[: wanted.limit]], "total": total}
