"""The owner of the thing that a request is about, for the access check, and the check that a name is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from connectors.hub.engine.family import Owner
from connectors.hub.engine.operation import Asked, Behind
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailboxes import own_mailboxes
from connectors.hub.serving.answers import DOOR, malformed
from connectors.hub.serving.policy import owner_of_task
from schemas.fold.view_rows import Row
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.principal.principals import ACTIVE as PRINCIPAL_ACTIVE
from schemas.streams.principal.principals import RESERVED_PRINCIPALS, WORKER, PrincipalRow
from schemas.streams.schedule.schedule_registry import ACTIVE, ScheduleRow
from schemas.streams.task.task_registry import TaskRow, TokenRow
from schemas.streams.webhook.webhooks import WebhookRow

R = TypeVar("R", bound=Row)


def owner_in(row_type: type[R], parameter: str, column: Callable[[R], str | None]) -> Owner:
    """Return a function that finds the owner of the thing in a request's path, as the access check needs it.

    The function returns None both for a thing that does not exist and for one without an owner. The access
    check then refuses each caller that may act only on its own things.

    Args:
        row_type: The type of the row, such as JobRow.
        parameter: The parameter of the path that is the row's key, such as `job_id`.
        column: Returns the owner from the row, or None if it has none.
    """

    def owner(hub: Hub, asked: Asked) -> str | None:
        row = row_of(hub, asked, row_type, parameter)
        return None if row is None else column(row)

    return owner


def session_of_job(hub: Hub, asked: Asked) -> str | None:
    """Return the session that has the job in a request's path. None: there is no such job or session."""
    row = hub.live_view.get(JobRow, asked.path["job_id"])
    return None if row is None else row.session


def reporter_of_job(hub: Hub, asked: Asked) -> str | None:
    """Return the owner of the events of the job in a request's path. None: the job is unknown.

    For a worker it is the session that has the job, for any other caller the principal that registered the job.
    Raises Behind if another gateway may have given the job to the caller a moment ago.
    """
    row, found = hub.live_view.get(JobRow, asked.path["job_id"]), None
    if row is not None:
        found = row.session if asked.caller.role == WORKER else row.registered_by
    if not asked.caller.owns(found) and not asked.is_fresh:
        raise Behind
    return found


def owner_of_task_in_path(hub: Hub, asked: Asked) -> str | None:
    """Return the owner of the task in a request's path: the principal that submitted it, None if it is unknown.

    For an agent it is the holder of the task's token, in the form of `owner_of_task`.
    """
    if asked.caller.task_id is not None:
        return owner_of_task(asked.path["task_id"])
    row = row_of(hub, asked, TaskRow, "task_id")
    return None if row is None else row.submitted_by


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
    """Return the owner of the webhook in a request's path: the caller, if it may drain this mailbox.

    A webhook with a mailbox of its own has no owner.
    """
    own = own_mailboxes(asked.caller, hub.settings.gateway.mailbox_per_token)
    return asked.principal if (DEFAULT_REALM, asked.path["name"]) in own else None


def owner_of_schedule(hub: Hub, asked: Asked) -> str | None:
    """Return the owner of the schedule in a request's path, also of a removed one. None: it never existed."""
    row = row_of(hub, asked, ScheduleRow, "name")
    return None if row is None else setter_of_schedule(row)


def free_schedule_or_own(hub: Hub, asked: Asked) -> str | None:
    """Return the owner of the active schedule in a request's path. A name without one is the caller's."""
    row = row_of(hub, asked, ScheduleRow, "name")
    return asked.principal if row is None or row.status != ACTIVE else setter_of_schedule(row)


def setter_of_schedule(row: ScheduleRow) -> str:
    """Return who set a schedule, in a form of `Caller.owns`: a principal, or the agent of a task."""
    return owner_of_task(row.from_task) or f"{DOOR}/{row.owner}"


def submitter_of_token(hub: Hub, asked: Asked) -> str | None:
    """Return the principal that submitted the task of the token in a request's path. None: it is unknown."""
    token = row_of(hub, asked, TokenRow, "token_id")
    # The log has the task before its token.
    task = None if token is None else hub.live_view.get(TaskRow, token.task_id)
    return None if task is None else task.submitted_by


def row_of(hub: Hub, asked: Asked, row_type: type[R], parameter: str) -> R | None:
    """Return the row whose key is a parameter of a request's path. None: it does not exist.

    Raises Behind if it may just have been created at another gateway.
    """
    row = hub.live_view.get(row_type, asked.path[parameter])
    if row is None and not asked.is_fresh:
        raise Behind
    return row


def check_name_is_free(
    hub: Hub, name: str, field: str, principal: str, route: str, *, is_participant: bool = False
) -> None:
    """Raise ApiError if a new agent, principal or participant would take a name that is reserved or in use.

    A refusal because the name is in use is recorded in the log.

    Args:
        hub: The hub.
        name: The new name.
        field: The field of the request body that has the name, for the error text.
        principal: The name of the caller, for the record of a refusal.
        route: Method and path template of the route, such as `POST /api/hub/agents`, for the record of a
            refusal.
        is_participant: Whether the name is for a participant, which must not have the name of an active
            principal.

    Raises:
        ApiError: 400 for a reserved name. 403 for the name of a listener, also of a removed one, of a
            principal, or of the webhook of a topic.
    """
    if name in RESERVED_PRINCIPALS:
        raise malformed(f"{field}: this name is reserved")
    row = hub.live_view.get(PrincipalRow, name) if is_participant else None
    if row is not None and row.status == PRINCIPAL_ACTIVE:
        raise hub.refusals.forbidden("a principal has this name", principal, route)
    webhook = hub.live_view.get(WebhookRow, name)
    if webhook is not None and webhook.has_own_mailbox:
        raise hub.refusals.forbidden("the webhook of a topic has this name", principal, route)
    # The name of a removed listener stays reserved, because its mailbox still exists.
    if hub.listeners.row(name) is not None:
        raise hub.refusals.forbidden("a listener has this name", principal, route)
