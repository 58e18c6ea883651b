"""The owner of what a request is about: the principal that registered, created or submitted it."""

from __future__ import annotations

from fastapi import Request

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import OwnerOf
from connectors.gateway.web.policy import owner_of_task
from schemas.fold.view_rows import (
    REGISTRY_JOBS,
    REGISTRY_SESSIONS,
    REGISTRY_TASKS,
    REGISTRY_TOKENS,
    JobRow,
    Row,
    SessionRow,
    TaskRow,
    TokenRow,
)


def owner_of_job(hub: Hub) -> OwnerOf:
    """Return the function that gives the owner of the job of a request's path: its registrar."""

    async def owner(request: Request) -> str | None:
        row = await _found(hub, REGISTRY_JOBS, str(request.path_params["job_id"]))
        return row.registered_by if isinstance(row, JobRow) else None

    return owner


def owner_of_session(hub: Hub) -> OwnerOf:
    """Return the function that gives the owner of the session of a request's path: its creator."""

    async def owner(request: Request) -> str | None:
        row = await _found(hub, REGISTRY_SESSIONS, str(request.path_params["name"]))
        return row.created_by if isinstance(row, SessionRow) else None

    return owner


def task_owner(hub: Hub) -> OwnerOf:
    """Return the function that gives the owner of the task of a request's path: to an agent, the holder of the
    task's token; to everybody else, the principal that submitted the task.
    """

    async def owner(request: Request) -> str | None:
        task_id = str(request.path_params["task_id"])
        if request.state.caller.task_id is not None:
            return owner_of_task(task_id)
        return await _submitter(hub, task_id)

    return owner


def owner_of_token(hub: Hub) -> OwnerOf:
    """Return the function that gives the owner of the token of a request's path: the submitter of its task."""

    async def owner(request: Request) -> str | None:
        row = await _found(hub, REGISTRY_TOKENS, str(request.path_params["token_id"]))
        return await _submitter(hub, row.task_id) if isinstance(row, TokenRow) else None

    return owner


async def _submitter(hub: Hub, task_id: str) -> str | None:
    row = await _found(hub, REGISTRY_TASKS, task_id)
    return row.submitted_by if isinstance(row, TaskRow) else None


async def _found(hub: Hub, table: str, key: str) -> Row | None:
    """Return a row. Where there is none yet, another gateway may just have answered its creation: look again
    after everything in the log is settled here. Raises BackboneUnreachable.
    """
    row = hub.live_view.row(table, key)
    if row is None:
        await hub.fresh.catch_up()
        row = hub.live_view.row(table, key)
    return row
