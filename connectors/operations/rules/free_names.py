"""The check that a new name is free: each name is also that of a mailbox, which two owners must not share."""

from __future__ import annotations

from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import malformed
from schemas.streams.principal.principals import ACTIVE, RESERVED_PRINCIPALS, PrincipalRow
from schemas.streams.webhook.webhook_registry import WebhookRow


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
    if row is not None and row.status == ACTIVE:
        raise hub.refusals.forbidden("a principal has this name", principal, route)
    webhook = hub.live_view.get(WebhookRow, name)
    if webhook is not None and webhook.has_own_mailbox:
        raise hub.refusals.forbidden("the webhook of a topic has this name", principal, route)
    # The name of a removed listener stays reserved, because its mailbox still exists.
    if hub.listeners.row(name) is not None:
        raise hub.refusals.forbidden("a listener has this name", principal, route)
