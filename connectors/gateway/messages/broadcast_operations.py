"""The operations that send one message to all, and that read the audit log (HH-06, HH-08, DL-07)."""

from __future__ import annotations

from typing import Final

from fastapi import Response

from connectors.gateway.engine.operation import Asked, CarefulOperation, IsGone
from connectors.gateway.messages.blobs import reference_to
from connectors.gateway.messages.message_operations import MESSAGES, new_message
from connectors.gateway.rules.hub_policy import broadcast_recipients
from connectors.gateway.rules.message_limits import check_rate, post_to_all
from connectors.gateway.rules.message_models import AuditAnswer, AuditFilter, MessageEnvelope
from connectors.gateway.rules.message_policy import check_message
from connectors.gateway.rules.participant_models import BroadcastAnswer, BroadcastRequest
from connectors.gateway.web.answers import encoded_within, json_answer
from connectors.gateway.web.idempotency import request_uuid
from connectors.gateway.web.policy import Action
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

AUDIT: Final = "/api/hub/audit"


class BroadcastMessage(CarefulOperation):
    """Put a message into the mailboxes of all other participants and of the operator.

    The answer comes when all messages are stored, and has their number. A mailbox that is full gets none.
    Repeating an interrupted broadcast with the same idempotency key completes it. It then also reaches
    participants that have come since.
    """

    NAME = "broadcast_message"
    PATH = f"{MESSAGES}/broadcast"
    ACTION = Action.MESSAGE_BROADCAST
    ANSWER = BroadcastAnswer
    BODY = BroadcastRequest

    async def slowly(self, asked: Asked, is_gone: IsGone) -> Response:
        """Send the messages, each with a record of its own, so that few of them are in memory."""
        hub, body, caller, broadcast_id = self.hub, asked.body, asked.caller, str(asked.made)
        recipients, said = broadcast_recipients(hub.lists, caller.principal), dict(asked.body)
        envelopes = [MessageEnvelope(recipient=recipient, **said) for recipient in recipients]
        if envelopes:
            # All recipients exist and no other rule depends on the recipient, so one check is enough.
            check_message(hub, caller, recipients[0], body.type, self.route)
        blob = None if body.blob is None else await reference_to(hub, body.blob)
        # All copies share the text.
        text = canonical(body.payload).decode("utf-8")
        messages = [
            new_message(caller, one, text, str(request_uuid(broadcast_id, one.recipient)), broadcast_id, blob)
            for one in envelopes
        ]
        check_rate(hub, caller.principal, len(text.encode()) * len(messages), len(messages), self.route)
        verdicts, full = await post_to_all(hub, messages, asked.origin)
        answer = {"broadcast_id": broadcast_id, "recipients": len(verdicts), "full": full}
        return json_answer(answer, verdict=DUPLICATE if set(verdicts) == {DUPLICATE} else ACCEPTED)


class ReadAudit(CarefulOperation):
    """Show the audit log: the newest delivered messages, and the newest refused requests to send one.

    `limit` is the number of entries, by default the setting `gateway.audit_messages`. An answer has
    `limits.answer_bytes` at most; `left` is the number of older entries beyond that.
    """

    NAME = "read_audit"
    METHOD = "GET"
    PATH = AUDIT
    ACTION = Action.AUDIT_READ
    ANSWER = AuditAnswer
    QUERY = AuditFilter
    KEY = None

    async def slowly(self, asked: Asked, is_gone: IsGone) -> Response:
        """Return the newest entries that fit, which may be a long answer."""
        entries = self.hub.audit.newest(asked.query.limit)
        shown = encoded_within(reversed(entries), self.hub.settings.limits.answer_bytes)
        return json_answer({"entries": shown[::-1], "left": len(entries) - len(shown)})
