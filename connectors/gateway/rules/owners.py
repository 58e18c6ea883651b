"""The owners of the things that requests are about, for the access check."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import OwnerOf
from connectors.gateway.web.policy import owner_of_task
from schemas.fold.view_rows import Row
from schemas.streams.job.job_registry import JobRow
from schemas.streams.task.task_registry import TaskRow, TokenRow

R = TypeVar("R", bound=Row)


def owner_in(hub: Hub, row_type: type[R], parameter: str, column: Callable[[R], str | None]) -> OwnerOf:
    """Return a function that reads the owner from a row.

    Args:
        hub: The hub.
        row_type: The type of the row.
        parameter: The parameter of the route's path that is the key of the row.
        column: Returns the owner from the row.
    """

    async def owner(request: Request) -> str | None:
        row = await _found(hub, row_type, str(request.path_params[parameter]))
        return None if row is None else column(row)

    return owner


def session_of_job(hub: Hub) -> OwnerOf:
    """Return a function that reads the session that holds the job of the path."""

    async def owner(request: Request) -> str | None:
        row = hub.live_view.get(JobRow, str(request.path_params["job_id"]))
        return None if row is None else row.session

    return owner


def owner_of_task_in_path(hub: Hub) -> OwnerOf:
    """Return a function that reads the owner of the task of the path.

    For an agent it is the holder of the task's token, for every other caller the principal that submitted the
    task.
    """
    submitter = owner_in(hub, TaskRow, "task_id", lambda row: row.submitted_by)

    async def owner(request: Request) -> str | None:
        if request.state.caller.task_id is not None:
            return owner_of_task(str(request.path_params["task_id"]))
        return await submitter(request)

    return owner


def submitter_of_token(hub: Hub) -> OwnerOf:
    """Return a function that reads the principal that submitted the task of the token of the path."""

    async def owner(request: Request) -> str | None:
        token = await _found(hub, TokenRow, str(request.path_params["token_id"]))
        task = None if token is None else await _found(hub, TaskRow, token.task_id)
        return None if task is None else task.submitted_by

    return owner


async def _found(hub: Hub, row_type: type[R], key: str) -> R | None:
    """Return a row. Raises BackboneUnreachable.

    A missing row may just have been created at another gateway, so look again after catching up with the log.
    """
    row = hub.live_view.get(row_type, key)
    if row is None:
        await hub.fresh.catch_up()
        row = hub.live_view.get(row_type, key)
    return row
