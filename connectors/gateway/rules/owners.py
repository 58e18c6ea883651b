"""The owner of the job, task, session, token, mailbox or schedule of a request, for the access check."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from connectors.gateway.engine.operation import Asked, Behind
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import own_mailboxes
from connectors.gateway.web.admission import OwnerOf
from connectors.gateway.web.policy import owner_of_task
from connectors.gateway.web.refusals import DOOR
from schemas.fold.view_rows import Row
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.principal.principals import WORKER
from schemas.streams.schedule.schedule_registry import ACTIVE, ScheduleRow
from schemas.streams.task.task_registry import TaskRow, TokenRow

R = TypeVar("R", bound=Row)


def owner_in(hub: Hub, row_type: type[R], parameter: str, column: Callable[[R], str | None]) -> OwnerOf:
    """Return a function with which the access check finds the owner of the thing in a request's path.

    The returned coroutine function takes the request and reads the thing's row from the live view. If the row
    is missing, it waits until the live view has caught up with the log, and reads again; it raises
    BackboneUnreachable if that takes too long. It returns None both for a thing that does not exist and for one
    without an owner. The access check then refuses each caller that may act only on its own things.

    Args:
        hub: The hub.
        row_type: The type of the row, such as JobRow.
        parameter: The parameter of the path that is the row's key, such as `job_id`.
        column: Returns the owner from the row, or None if it has none.
    """

    async def owner(request: Request) -> str | None:
        row = await _found(hub, row_type, str(request.path_params[parameter]))
        return None if row is None else column(row)

    return owner


def session_of_job(hub: Hub) -> OwnerOf:
    """Return a function with which the access check finds the session that has the job in a request's path.

    The returned coroutine function takes the request, and returns the session's name. It returns None for an
    unknown job, and for one that no session has.
    """

    async def owner(request: Request) -> str | None:
        row = hub.live_view.get(JobRow, str(request.path_params["job_id"]))
        return None if row is None else row.session

    return owner


def reporter_of_job(hub: Hub) -> OwnerOf:
    """Return a function with which the access check finds who reports events of the job in a request's path.

    The returned coroutine function takes the request. For a worker it returns the session that has the job, for
    any other caller the principal that registered the job. It returns None for an unknown job. It raises
    BackboneUnreachable if the live view does not catch up with a pick at another gateway in time.
    """

    async def owner(request: Request) -> str | None:
        key, caller = str(request.path_params["job_id"]), request.state.caller
        found = None
        for is_last in (False, True):
            row = hub.live_view.get(JobRow, key)
            if row is not None:
                found = row.session if caller.role == WORKER else row.registered_by
            if caller.owns(found) or is_last:
                break
            await hub.fresh.catch_up()
        return found

    return owner


def owner_of_task_in_path(hub: Hub) -> OwnerOf:
    """Return a function with which the access check finds the owner of the task in a request's path.

    The returned coroutine function takes the request. If an agent sent it, the owner is the holder of the
    task's token, in the form of `owner_of_task`. For any other caller the owner is the principal that submitted
    the task, or None for an unknown task.
    """
    submitter = owner_in(hub, TaskRow, "task_id", lambda row: row.submitted_by)

    async def owner(request: Request) -> str | None:
        if request.state.caller.task_id is not None:
            return owner_of_task(str(request.path_params["task_id"]))
        return await submitter(request)

    return owner


def owner_of_mailbox(hub: Hub, asked: Asked) -> str | None:
    """Return the owner of the mailbox in a request's path, from the point of view of the caller.

    The caller owns the mailboxes that it may drain. Any other mailbox of the realm `default` belongs to the
    principal of its name. The result is None for a mailbox in another realm: principals exist in the default
    realm only, and others may use the same names.
    """
    mailbox = asked.path["realm"], asked.path["name"]
    if mailbox in own_mailboxes(asked.caller, hub.settings.gateway.mailbox_per_token):
        return asked.principal
    return mailbox[1] if mailbox[0] == DEFAULT_REALM else None


def owner_of_webhook(hub: Hub, asked: Asked) -> str | None:
    """Return the owner of the webhook in a request's path: the caller, if it may drain the mailbox of this name.

    A webhook with a mailbox of its own has no owner.
    """
    own = own_mailboxes(asked.caller, hub.settings.gateway.mailbox_per_token)
    return asked.principal if (DEFAULT_REALM, asked.path["name"]) in own else None


def owner_of_schedule(hub: Hub, asked: Asked) -> str | None:
    """Return the owner of the schedule in a request's path, also of a removed one. None: it never existed."""
    row = row_of(hub, asked, ScheduleRow, "name")
    return None if row is None else setter_of_schedule(row)


def free_schedule_or_own(hub: Hub, asked: Asked) -> str | None:
    """Return the owner of the schedule in a request's path, or the caller if no schedule of this name is active."""
    row = row_of(hub, asked, ScheduleRow, "name")
    return asked.principal if row is None or row.status != ACTIVE else setter_of_schedule(row)


def setter_of_schedule(row: ScheduleRow) -> str:
    """Return who set a schedule, in a form of `Caller.owns`: a principal, or the agent of a task."""
    return owner_of_task(row.from_task) or f"{DOOR}/{row.owner}"


def submitter_of_token(hub: Hub) -> OwnerOf:
    """Return a function with which the access check finds the principal that submitted a token's task.

    The returned coroutine function takes the request, whose path has the token's id. It returns None for an
    unknown token or task.
    """

    async def owner(request: Request) -> str | None:
        token = await _found(hub, TokenRow, str(request.path_params["token_id"]))
        task = None if token is None else await _found(hub, TaskRow, token.task_id)
        return None if task is None else task.submitted_by

    return owner


def row_of(hub: Hub, asked: Asked, row_type: type[R], parameter: str) -> R | None:
    """Return the row whose key is a parameter of a request's path. None: it does not exist.

    Raises Behind if it may just have been created at another gateway.
    """
    row = hub.live_view.get(row_type, asked.path[parameter])
    if row is None and not asked.is_fresh:
        raise Behind
    return row


async def _found(hub: Hub, row_type: type[R], key: str) -> R | None:
    """Return a row. Raises BackboneUnreachable.

    A missing row may just have been created at another gateway, so look again after catching up with the log.
    """
    row = hub.live_view.get(row_type, key)
    if row is None:
        await hub.fresh.catch_up()
        row = hub.live_view.get(row_type, key)
    return row
