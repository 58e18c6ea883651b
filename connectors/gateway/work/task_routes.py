"""The tasks of the hub (HH-03, HH-04) and their tokens (HH-02): submit, list, end, revoke."""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query, Request, Response

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
from connectors.gateway.rules.hub_policy import agent_row, evaluate_task_assignment
from connectors.gateway.rules.owners import owner_of_token, task_owner
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import token_mailbox
from connectors.gateway.services.task_keeper import container_of
from connectors.gateway.services.task_tokens import task_token
from connectors.gateway.web.admission import asks_for
from connectors.gateway.web.answers import (
    ApiError,
    check_task_text,
    iso_moment,
    json_answer,
    not_found,
    refuse_rejected,
)
from connectors.gateway.web.idempotency import IdempotencyKey, request_uuid
from connectors.gateway.web.models import ERRORS, NAME_PATTERN
from connectors.gateway.web.policy import Action, Caller
from connectors.gateway.web.refusals import DOOR
from schemas.fold import life_cycles as states
from schemas.fold.view_rows import (
    REGISTRY_CONTAINERS,
    REGISTRY_TASKS,
    REGISTRY_TOKENS,
    ContainerRow,
    TaskRow,
    TokenRow,
)
from schemas.streams.agents.agent_registry import DEFINED
from schemas.streams.principal.principals import ACTIVE, token_hash
from schemas.streams.task.task_registry import (
    TaskCancellation,
    TaskCompletion,
    TaskFailure,
    TaskStart,
    TokenRevocation,
    result_text,
    result_value,
    task_record,
)
from schemas.wire.ids import NAME_LIMIT
from schemas.wire.verdicts import POLICY

TASKS: Final = "/api/hub/tasks"
TOKENS: Final = "/api/hub/tokens"
LAUNCH_FAILED: Final = "launch_failed"
EXPIRED: Final = "expired"
_POLL_S: Final = 0.02

TaskPath = Annotated[str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT)]
TokenPath = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$")]
_Ending = TaskCompletion | TaskFailure | TaskCancellation


def add_task_routes(app: FastAPI, hub: Hub) -> None:
    """Add the routes under `/api/hub/tasks` and `/api/hub/tokens`."""
    _add_submission(app, hub)
    _add_endings(app, hub)
    _add_task_reads(app, hub)
    _add_tokens(app, hub)


def _add_submission(app: FastAPI, hub: Hub) -> None:
    @app.post(TASKS, status_code=201, response_model=SubmittedAnswer, responses=ERRORS)
    @asks_for(Action.TASK_SUBMIT)
    async def submit_task(request: Request, body: TaskRequest, key: IdempotencyKey = None) -> Response:
        """Give an agent a task, and start the agent. The task's token is told here.

        Waits until the agent has started; 502 `launch_failed` when it does not.
        """
        check_task_text(body.description, hub.settings.limits.task_characters)
        caller: Caller = request.state.caller
        task_id = str(request_uuid(caller.requester, key))
        known = task_row(hub, task_id)
        token = task_token(hub.keyring, task_id, None if known is None else known.token_id)
        # A key that was used with other content is refused for that, but what is no task at all is none.
        if known is None or not body.description:
            _check_policy(hub, caller, body)
        agent = agent_row(hub.live_view, body.agent_name)
        start = TaskStart(
            task_id=task_id,
            request_id=task_id,
            description=body.description,
            agent_name=body.agent_name,
            capabilities=_capabilities(hub, known, [] if agent is None else agent.capabilities),
            token_sha256=token_hash(token),
            expiry_ms=round(hub.settings.gateway.token_ttl_s * 1000),
            session_name=session_of(known, task_id),
        )
        record = task_record(start, door=DOOR, principal=caller.principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        row = await launched(hub, task_id)
        if row.status == states.FAILED and never_ran(hub, task_id):
            raise ApiError(502, LAUNCH_FAILED, row.error or "the agent was not started")
        answer = {
            "task": task_as_json(row),
            "token": token,
            "url": hub.settings.gateway_url,
            "mailbox": _mailbox_of(hub, row),
        }
        return json_answer(answer, 201, settled.verdict)


def _check_policy(hub: Hub, caller: Caller, body: TaskRequest) -> None:
    decision = evaluate_task_assignment(hub.live_view, body.agent_name, body.description)
    if decision.allowed:
        return
    hub.refusals.record(POLICY, decision.reason, caller.principal, f"POST {TASKS}")
    agent = agent_row(hub.live_view, body.agent_name)
    if agent is None or agent.status != DEFINED:
        raise not_found(decision.reason)
    raise ApiError(403, POLICY, decision.reason)


def _mailbox_of(hub: Hub, row: TaskRow) -> str:
    if hub.settings.gateway.mailbox_per_token and row.token_id is not None:
        return token_mailbox(row.agent_name, row.token_id)
    return row.agent_name


def _capabilities(hub: Hub, known: TaskRow | None, wanted: list[str]) -> list[str]:
    """Those of the first time for a repeated request: the definition may have changed meanwhile."""
    token = None if known is None or known.token_id is None else _token_row(hub, known.token_id)
    return wanted if token is None else token.capabilities


def session_of(known: TaskRow | None, task_id: str) -> str | None:
    """Return the name of what a task runs in: its container. A repeated request says what the first one said,
    because the name is part of its content.
    """
    return container_of(task_id) if known is None else known.session_name


async def launched(hub: Hub, task_id: str) -> TaskRow:
    """The task's row when its agent runs, it has ended, or `gateway.launch_timeout_s` is over."""
    deadline = time.monotonic() + hub.settings.gateway.launch_timeout_s
    while True:
        row = task_row(hub, task_id)
        if row is None:
            raise not_found("no task with this id")
        container = hub.live_view.row(REGISTRY_CONTAINERS, container_of(task_id))
        runs = isinstance(container, ContainerRow) and container.state in (states.RUNNING, states.MONITORING)
        if runs or row.status in states.TASK_TERMINAL or time.monotonic() > deadline:
            return row
        await asyncio.sleep(_POLL_S)


def never_ran(hub: Hub, task_id: str) -> bool:
    """Whether nothing ran for the task."""
    container = hub.live_view.row(REGISTRY_CONTAINERS, container_of(task_id))
    return not isinstance(container, ContainerRow) or container.handle is None


def _add_endings(app: FastAPI, hub: Hub) -> None:
    async def end(request: Request, body: _Ending) -> Response:
        record = task_record(body, door=DOOR, principal=request.state.caller.principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        row = task_row(hub, body.task_id)
        return json_answer(None if row is None else task_as_json(row), verdict=settled.verdict)

    def made(request: Request, key: str | None) -> str:
        return str(request_uuid(request.state.caller.principal, key))

    @app.post(f"{TASKS}/{{task_id}}/complete", response_model=TaskAnswer, responses=ERRORS)
    @asks_for(Action.TASK_END, task_owner(hub))
    async def complete_task(
        request: Request,
        task_id: TaskPath,
        body: TaskCompletionRequest | None = None,
        key: IdempotencyKey = None,
    ) -> Response:
        """Complete a task with its result. Its token is revoked, and what was launched for it stopped."""
        result = result_text("" if body is None else body.result)
        return await end(request, TaskCompletion(task_id=task_id, request_id=made(request, key), result=result))

    @app.post(f"{TASKS}/{{task_id}}/fail", response_model=TaskAnswer, responses=ERRORS)
    @asks_for(Action.TASK_END, task_owner(hub))
    async def fail_task(
        request: Request, task_id: TaskPath, body: TaskFailureRequest, key: IdempotencyKey = None
    ) -> Response:
        """Say that a task has failed, and why."""
        return await end(request, TaskFailure(task_id=task_id, request_id=made(request, key), error=body.error))

    @app.post(f"{TASKS}/{{task_id}}/cancel", response_model=TaskAnswer, responses=ERRORS)
    @asks_for(Action.TASK_CANCEL, task_owner(hub))
    async def cancel_task(
        request: Request, task_id: TaskPath, body: TaskCancelRequest | None = None, key: IdempotencyKey = None
    ) -> Response:
        """Cancel a task that has not ended."""
        reason = "" if body is None else body.reason
        return await end(
            request, TaskCancellation(task_id=task_id, request_id=made(request, key), reason=reason)
        )

    @app.delete(f"{TASKS}/{{task_id}}", response_model=TaskAnswer, responses=ERRORS)
    @asks_for(Action.TASK_CANCEL, task_owner(hub))
    async def delete_task(request: Request, task_id: TaskPath, key: IdempotencyKey = None) -> Response:
        """Cancel a task, by another name: the task and its records stay."""
        return await end(request, TaskCancellation(task_id=task_id, request_id=made(request, key)))


def _add_task_reads(app: FastAPI, hub: Hub) -> None:
    @app.get(TASKS, response_model=TasksAnswer, responses=ERRORS)
    @asks_for(Action.TASK_READ)
    async def list_tasks(wanted: Annotated[TaskFilter, Query()]) -> Response:
        """List tasks by status and agent, newest first."""
        return json_answer(await asyncio.to_thread(_listed, hub, wanted))

    @app.get(f"{TASKS}/{{task_id}}", response_model=TaskAnswer, responses=ERRORS)
    @asks_for(Action.TASK_READ, task_owner(hub))
    async def show_task(task_id: TaskPath) -> Response:
        """Show one task."""
        row = task_row(hub, task_id)
        if row is None:
            raise not_found("no task with this id")
        return json_answer(task_as_json(row))


def _add_tokens(app: FastAPI, hub: Hub) -> None:
    @app.get(TOKENS, response_model=TokensAnswer, responses=ERRORS)
    @asks_for(Action.TOKEN_LIST)
    async def list_tokens(wanted: Annotated[TokenFilter, Query()]) -> Response:
        """List the tokens of tasks, newest first; never their values."""
        return json_answer(await asyncio.to_thread(_tokens, hub, wanted, time.time()))

    @app.post(f"{TOKENS}/{{token_id}}/revoke", response_model=TokenAnswer, responses=ERRORS)
    @asks_for(Action.TOKEN_REVOKE, owner_of_token(hub))
    async def revoke_token(
        request: Request, token_id: TokenPath, body: TaskCancelRequest | None = None, key: IdempotencyKey = None
    ) -> Response:
        """Revoke a token while its task goes on. A second time changes nothing."""
        row = _token_row(hub, token_id)
        if row is None:
            raise not_found("no token with this id")
        principal = request.state.caller.principal
        revocation = TokenRevocation(
            task_id=row.task_id,
            token_id=token_id,
            request_id=str(request_uuid(principal, key)),
            reason="" if body is None else body.reason,
        )
        settled = refuse_rejected(
            await hub.appender.settle(task_record(revocation, door=DOOR, principal=principal))
        )
        now = _token_row(hub, token_id) or row
        return json_answer(_token_as_json(now, time.time()), verdict=settled.verdict)


def task_row(hub: Hub, task_id: str) -> TaskRow | None:
    """The row of a task, None for an unknown one."""
    row = hub.live_view.row(REGISTRY_TASKS, task_id)
    return row if isinstance(row, TaskRow) else None


def task_as_json(row: TaskRow) -> dict[str, Any]:
    """A task as the hub shows it."""
    return {
        "id": row.task_id,
        "description": row.description,
        "agent_name": row.agent_name,
        "status": row.status,
        "token_id": row.token_id,
        "session_name": row.session_name,
        "result": None if row.result is None else result_value(row.result),
        "error": row.error,
        "submitted_by": row.submitted_by,
        "submitted_at": iso_moment(row.submitted_at),
        "started_at": None if row.started_at is None else iso_moment(row.started_at),
        "ended_at": None if row.ended_at is None else iso_moment(row.ended_at),
    }


def _token_row(hub: Hub, token_id: str) -> TokenRow | None:
    row = hub.live_view.row(REGISTRY_TOKENS, token_id)
    return row if isinstance(row, TokenRow) else None


def _token_as_json(row: TokenRow, now_s: float) -> dict[str, Any]:
    return {
        "token_id": row.token_id,
        "agent_name": row.agent_name,
        "task_id": row.task_id,
        "capabilities": row.capabilities,
        "status": _token_status(row, now_s),
        "issued": row.issued,
        "expiry": row.expiry,
        "revoked_at": None if row.revoked_at is None else iso_moment(row.revoked_at),
        "revoked_why": row.revoked_why,
    }


def _token_status(row: TokenRow, now_s: float) -> str:
    return EXPIRED if row.status == ACTIVE and row.expiry <= now_s * 1000 else row.status


def _listed(hub: Hub, wanted: TaskFilter) -> dict[str, Any]:
    rows = [
        row
        for row in hub.live_view.rows(REGISTRY_TASKS)
        if isinstance(row, TaskRow)
        and wanted.status in (None, row.status)
        and wanted.agent_name in (None, row.agent_name)
    ]
    newest = heapq.nlargest(wanted.limit, rows, key=lambda row: (row.submitted_at, row.task_id))
    return {"tasks": [task_as_json(row) for row in newest], "total": len(rows)}


def _tokens(hub: Hub, wanted: TokenFilter, now_s: float) -> dict[str, Any]:
    rows = [
        row
        for row in hub.live_view.rows(REGISTRY_TOKENS)
        if isinstance(row, TokenRow) and wanted.status in (None, _token_status(row, now_s))
    ]
    newest = heapq.nlargest(wanted.limit, rows, key=lambda row: (row.issued, row.token_id))
    return {"tokens": [_token_as_json(row, now_s) for row in newest], "total": len(rows)}
