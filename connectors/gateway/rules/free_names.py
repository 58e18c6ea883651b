"""The check that a new name is free: a name is also a mailbox, which two owners must not share."""

from __future__ import annotations

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import malformed
from schemas.streams.principal.principals import ACTIVE, RESERVED_PRINCIPALS, PrincipalRow


def check_name_is_free(
    hub: Hub, name: str, field: str, principal: str, route: str, *, is_participant: bool = False
) -> None:
    """Check that no other kind of owner has a name, and record a refusal.

    Args:
        hub: The hub.
        name: The new name.
        field: The field of the request that has the name.
        principal: The caller.
        route: The method and the template of the route.
        is_participant: Whether the name is for a participant, which must not have the name of a principal.

    Raises:
        ApiError: 400 for a reserved name, 403 for a name that is in use.
    """
    if name in RESERVED_PRINCIPALS:
        raise malformed(f"{field}: this name is reserved")
    row = hub.live_view.get(PrincipalRow, name) if is_participant else None
    if row is not None and row.status == ACTIVE:
        raise hub.refusals.forbidden("a principal has this name", principal, route)
    # The name of a removed listener stays reserved, because its mailbox still exists.
    if hub.listeners.row(name) is not None:
        raise hub.refusals.forbidden("a listener has this name", principal, route)
