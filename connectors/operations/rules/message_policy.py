"""The check whether a client may send a message, now or by a schedule. Each refusal is recorded (HH-09)."""

from __future__ import annotations

from connectors.hub.reactor.known_recipients import has_mailbox
from connectors.hub.services.audit_log import why_refused
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.policy import Caller
from connectors.operations.rules.hub_policy import (
    evaluate_message,
    evaluate_publication,
    is_known_recipient,
    tokens_at_us,
)
from trunkline_agent.wire.verdicts import POLICY, UNKNOWN_RECIPIENT


def check_message(hub: Hub, caller: Caller, recipient: str, kind: str, route: str) -> None:
    """Raise ApiError if a client may not send a message, and append a record of the refusal to the log.

    The status is 404 for an unknown recipient, and 403 for any other reason.

    Args:
        hub: The hub.
        caller: The client.
        recipient: The name of the mailbox.
        kind: The type of the message.
        route: Method and path template of the route, for the record.
    """
    if hub.names.of(has_mailbox, recipient) and evaluate_publication(kind).allowed:
        return
    at_us = tokens_at_us(hub)
    decision = evaluate_message(hub.live_view, caller, recipient, kind, tokens_at_us=at_us)
    if decision.allowed:
        return
    why = why_refused({"recipient": recipient, "type": kind}, decision.reason)
    if not is_known_recipient(hub.live_view, recipient, tokens_at_us=at_us):
        hub.refusals.record(UNKNOWN_RECIPIENT, why, caller.principal, route)
        raise ApiError(404, UNKNOWN_RECIPIENT, decision.reason)
    hub.refusals.record(POLICY, why, caller.principal, route)
    raise ApiError(403, POLICY, decision.reason)
