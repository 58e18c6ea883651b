"""The HTTP routes that send messages (HH-06, HH-08, DL-07): to one recipient or to all, and the audit log."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query, Request, Response

from connectors.gateway.messages.blobs import reference_to
from connectors.gateway.messages.replies import wait_reply
from connectors.gateway.messages.shown_messages import message_as_json
from connectors.gateway.rules.hub_policy import broadcast_recipients
from connectors.gateway.rules.message_limits import check_limits, check_rate, post_message, post_to_all
from connectors.gateway.rules.message_models import (
    AuditAnswer,
    AuditFilter,
    DeliveredAnswer,
    MessageEnvelope,
    SendFilter,
)
from connectors.gateway.rules.message_policy import check_message
from connectors.gateway.rules.participant_models import BroadcastAnswer, BroadcastRequest
from connectors.gateway.rules.queue_room import check_room
from connectors.gateway.services.audit_log import why_refused
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import own_mailboxes
from connectors.gateway.web.admission import Gate, Routes
from connectors.gateway.web.answers import encoded_within, json_answer
from connectors.gateway.web.idempotency import IdempotencyKey, WriteRequest, request_uuid, write_of
from connectors.gateway.web.models import ERRORS
from connectors.gateway.web.policy import Action, Caller
from schemas.streams.blob.blob_registry import BlobReference
from schemas.streams.mailboxes.message import LEASED, Message, verified_message
from schemas.wire.record import JSON_CONTENT
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

MESSAGES: Final = "/api/hub/messages"
AUDIT: Final = "/api/hub/audit"


def add_message_routes(routes: Routes, hub: Hub, gate: Gate) -> None:
    """Add to `routes` the HTTP routes that send and broadcast messages, and read the audit log.

    Called once, when the gateway starts. The paths begin with `/api/hub/messages`, and `/api/hub/audit`. The
    routes read from `hub` and append records through it. During a wait, `gate` checks the client's token.
    """
    _add_send_route(routes, hub, gate)
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


def _add_send_route(routes: Routes, hub: Hub, gate: Gate) -> None:
    """Add the route that sends a message to one recipient, and may wait for the reply."""

    @routes.post(
        MESSAGES,
        Action.MESSAGE_SEND,
        DeliveredAnswer,
        why_refused=why_refused,
        responses={202: {"model": DeliveredAnswer, "description": "No reply came in time."}, **ERRORS},
    )
    async def send_message(
        request: Request,
        body: MessageEnvelope,
        wanted: Annotated[SendFilter, Query()],
        key: IdempotencyKey = None,
    ) -> Response:
        """Put a message into the mailbox of its recipient, which by default is the hub.

        The answer comes when the message is stored. The answer is 404 for an unknown recipient, and 403 when
        the caller may not write to the recipient. It is 409 when the idempotency key was used for another
        message, and 429 when too many messages wait for a listener.

        With `deliver_after_s`, the recipient sees the message after that time. With `expires_in_s`, a message
        that nobody has taken by then ends as expired. Both count from the time when the log stores the message.

        `blob` is the digest of a large content that was uploaded before, and that only the recipient gets. The
        answer is 404 for an unknown blob, and 409 for one that was removed or will be soon: upload it again.

        With `wait_reply`, the request waits for a message of the recipient in the caller's mailbox whose
        `in_reply_to` is this message, takes it, and answers with it. Without a reply in time the answer is 202;
        the reply will be in the mailbox. A repeated request with the same idempotency key waits again, and gets
        the same reply. With `reply_lease`, the reply is leased for so many seconds, and `lease_id` names the
        lease. Unless it is acknowledged in time, the reply is in the mailbox again.
        """
        # Not a parameter `WriteRequest`: FastAPI needs a twentieth of this route's time for a dependency.
        write = write_of(request, key)
        check_message(hub, write.caller, body.recipient, body.type, f"POST {MESSAGES}")
        known = hub.mailboxes.mailbox_of(write.request_id)
        blob = (
            None
            if body.blob is None
            else await reference_to(hub, body.blob, body.recipient, is_new=known is None)
        )
        text = canonical(body.payload).decode("utf-8")
        message = _message(write.caller, body, text, write.request_id, blob=blob)
        if known is None:
            check_room(hub, message.sender, message.recipient)
            check_limits(hub, message)
        said = {"delivered": body.deliver_after_s is None, "message_id": write.request_id}
        if not wanted.wait_reply:
            return json_answer(said, verdict=(await post_message(hub, message, write.origin)).verdict)
        mailboxes = own_mailboxes(write.caller, hub.settings.gateway.mailbox_per_token)
        with hub.mailbox_waits.waiting(mailboxes, is_taker=False) as wait:
            settled = await post_message(hub, message, write.origin)
            reply = await wait_reply(
                hub,
                wait,
                message.message_id,
                message.recipient,
                wanted.wait_reply,
                write.origin,
                lambda: gate.is_gone(request, is_probed=wanted.reply_lease is None),
                wanted.reply_lease,
            )
        if reply is None:
            return json_answer(said, 202, settled.verdict)
        if reply.status == LEASED:
            said["lease_id"] = reply.request_id
        return json_answer({**said, "reply": message_as_json(hub, reply)}, verdict=settled.verdict)


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
            _message(
                write.caller, one, text, str(request_uuid(broadcast_id, one.recipient)), broadcast_id, blob
            )
            for one in envelopes
        ]
        body_bytes = len(text.encode()) * len(messages)
        check_rate(hub, write.principal, body_bytes, len(messages), f"POST {MESSAGES}/broadcast")
        verdicts, full = await post_to_all(hub, messages, write.origin)
        answer = {"broadcast_id": broadcast_id, "recipients": len(verdicts), "full": full}
        return json_answer(answer, verdict=DUPLICATE if set(verdicts) == {DUPLICATE} else ACCEPTED)


def _message(
    caller: Caller,
    envelope: MessageEnvelope,
    text: str,
    message_id: str,
    broadcast_id: str | None = None,
    blob: BlobReference | None = None,
) -> Message:
    content = (envelope.type, text, JSON_CONTENT)
    sides = (caller.principal, envelope.recipient)
    return verified_message(
        message_id,
        *sides,
        *content,
        from_task=caller.task_id,
        broadcast_id=broadcast_id,
        in_reply_to=envelope.in_reply_to,
        thread=envelope.thread,
        blob=blob,
        **envelope.in_the_log(),
    )
