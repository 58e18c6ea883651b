"""The HTTP routes that send messages to all (HH-06, HH-08, DL-07), and the audit log."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query, Response

from connectors.gateway.messages.blobs import reference_to
from connectors.gateway.messages.message_operations import MESSAGES, new_message
from connectors.gateway.rules.hub_policy import broadcast_recipients
from connectors.gateway.rules.message_limits import check_rate, post_to_all
from connectors.gateway.rules.message_models import (
    AuditAnswer,
    AuditFilter,
    MessageEnvelope,
)
from connectors.gateway.rules.message_policy import check_message
from connectors.gateway.rules.participant_models import BroadcastAnswer, BroadcastRequest
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import encoded_within, json_answer
from connectors.gateway.web.idempotency import WriteRequest, request_uuid
from connectors.gateway.web.policy import Action
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

AUDIT: Final = "/api/hub/audit"


def add_message_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that broadcast messages, and read the audit log.

    Called once, when the gateway starts. The paths begin with `/api/hub/messages`, and `/api/hub/audit`. The
    routes read from `hub` and append records through it.
    """
    _add_broadcast_route(routes, hub)

    @routes.get(AUDIT, Action.AUDIT_READ, AuditAnswer)
    async def read_audit(wanted: Annotated[AuditFilter, Query()]) -> Response:
        """Show the audit log: the newest delivered messages, and the newest refused requests to send one.

        `limit` is the number of entries, by default the setting `gateway.audit_messages`. An answer has
        `limits.answer_bytes` at most; `left` is the number of older entries beyond that.
        """
        entries = hub.audit.newest(wanted.limit)
        shown = encoded_within(reversed(entries), hub.settings.limits.answer_bytes)
        return json_answer({"entries": shown[::-1], "left": len(entries) - len(shown)})


def _add_broadcast_route(routes: Routes, hub: Hub) -> None:
    """Add the route that sends one message to all other participants."""

    @routes.post(f"{MESSAGES}/broadcast", Action.MESSAGE_BROADCAST, BroadcastAnswer)
    async def broadcast_message(write: WriteRequest, body: BroadcastRequest) -> Response:
        """Put a message into the mailboxes of all other participants and of the operator.

        The answer comes when all messages are stored, and has their number. A mailbox that is full gets none.
        Repeating an interrupted broadcast with the same idempotency key completes it. It then also reaches
        participants that have come since.
        """
        recipients = broadcast_recipients(hub.lists, write.principal)
        said = dict(body)
        envelopes = [MessageEnvelope(recipient=recipient, **said) for recipient in recipients]
        if envelopes:
            # All recipients exist and no other rule depends on the recipient, so one check is enough.
            check_message(hub, write.caller, recipients[0], body.type, f"POST {MESSAGES}/broadcast")
        broadcast_id = write.request_id
        blob = None if body.blob is None else await reference_to(hub, body.blob)
        # All copies share the text.
        text = canonical(body.payload).decode("utf-8")
        messages = [
            new_message(
                write.caller, one, text, str(request_uuid(broadcast_id, one.recipient)), broadcast_id, blob
            )
            for one in envelopes
        ]
        body_bytes = len(text.encode()) * len(messages)
        check_rate(hub, write.principal, body_bytes, len(messages), f"POST {MESSAGES}/broadcast")
        verdicts, full = await post_to_all(hub, messages, write.origin)
        answer = {"broadcast_id": broadcast_id, "recipients": len(verdicts), "full": full}
        return json_answer(answer, verdict=DUPLICATE if set(verdicts) == {DUPLICATE} else ACCEPTED)
