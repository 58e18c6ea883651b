"""The HTTP routes for messages (HH-06, HH-08): send, broadcast, drain, mark as read, and the audit log.

A drain is a claim in the mailbox's stream. The first claim in the log gets a message, whatever the number of
gateways, and a repeated request id gets the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import orjson
from fastapi import Header, Query, Request, Response

from connectors.gateway.rules.hub_models import (
    AuditAnswer,
    AuditFilter,
    DeliveredAnswer,
    DrainedAnswer,
    DrainFilter,
    MessageEnvelope,
    ReadAnswer,
    ReadRequest,
)
from connectors.gateway.rules.hub_policy import broadcast_recipients, evaluate_message, is_known_recipient
from connectors.gateway.rules.participant_models import BroadcastAnswer, BroadcastRequest
from connectors.gateway.rules.queue_room import check_room
from connectors.gateway.rules.read_marks import mark_read
from connectors.gateway.services.audit_log import why_refused
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import Mailbox, own_mailboxes, token_mailbox
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import ApiError, iso_moment, json_answer, refuse_rejected
from connectors.gateway.web.idempotency import (
    IdempotencyKey,
    WriteRequest,
    caller_of,
    request_uuid,
    write_of,
)
from connectors.gateway.web.policy import Action, Caller
from connectors.gateway.web.refusals import DOOR
from schemas.streams.mailboxes.mailbox_requests import claim_record
from schemas.streams.mailboxes.message import (
    PRIORITIES,
    Message,
    MessageBodyRow,
    MessageRow,
    posting_record,
    verified_message,
)
from schemas.streams.task.task_registry import TaskRow
from schemas.wire.record import JSON_CONTENT
from schemas.wire.strict_json import canonical
from schemas.wire.verdicts import ACCEPTED, DUPLICATE, POLICY, SEQ_CONFLICT, UNKNOWN_RECIPIENT

MESSAGES: Final = "/api/hub/messages"
AUDIT: Final = "/api/hub/audit"
_PRIORITY: Final = {priority: place for place, priority in enumerate(PRIORITIES)}

RequestId = Annotated[
    str | None,
    Header(
        alias="X-Request-ID",
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="A drain with an id that was used before is the same drain and gets the same messages.",
    ),
]
"""The header, 1 to 255 visible ASCII characters."""


def add_message_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that send, broadcast, drain and mark messages, and read the audit log.

    Called once, when the gateway starts. The paths begin with `/api/hub/messages`, and `/api/hub/audit`. The
    routes read from `hub` and append records through it.
    """

    @routes.post(MESSAGES, Action.MESSAGE_SEND, DeliveredAnswer, why_refused=why_refused)
    async def send_message(request: Request, body: MessageEnvelope, key: IdempotencyKey = None) -> Response:
        """Put a message into the mailbox of its recipient, which by default is the hub.

        The answer comes when the message is stored. The answer is 404 for an unknown recipient, and 403 when
        the caller may not write to the recipient. It is 409 when the idempotency key was used for another
        message, and 429 when too many messages wait for a listener.
        """
        # Not a parameter `WriteRequest`: FastAPI needs a twentieth of this route's time for a dependency.
        write = write_of(request, key)
        _check_policy(hub, write.caller, body, MESSAGES)
        message = _message(write.caller, body, write.request_id)
        known = hub.mailboxes.mailbox_of(message.message_id)
        if known is not None and known != (message.realm, message.recipient):
            # The fold cannot find this conflict, because each mailbox only knows its own ids.
            raise ApiError(409, SEQ_CONFLICT, "this idempotency key was used for another recipient")
        if known is None:
            check_room(hub, message.sender, message.recipient)
        settled = await hub.appender.settle_accepted(posting_record(message, **write.origin))
        return json_answer({"delivered": True, "message_id": message.message_id}, verdict=settled.verdict)

    @routes.post(f"{MESSAGES}/broadcast", Action.MESSAGE_BROADCAST, BroadcastAnswer)
    async def broadcast_message(write: WriteRequest, body: BroadcastRequest) -> Response:
        """Put a message into the mailboxes of all other participants and of the operator.

        The answer comes when all messages are stored, and has their number. Repeating an interrupted broadcast
        with the same idempotency key completes it. It then also reaches participants that have come since.
        """
        recipients = broadcast_recipients(hub.live_view, write.principal)
        envelopes = [MessageEnvelope(recipient=r, type=body.type, payload=body.payload) for r in recipients]
        if envelopes:
            # All recipients exist and no other rule depends on the recipient, so one check is enough.
            _check_policy(hub, write.caller, envelopes[0], f"{MESSAGES}/broadcast")
        broadcast_id = write.request_id
        messages = [
            _message(write.caller, one, str(request_uuid(broadcast_id, one.recipient)), broadcast_id)
            for one in envelopes
        ]
        settled = await hub.appender.settle_all(posting_record(message, **write.origin) for message in messages)
        verdicts = {refuse_rejected(one).verdict for one in settled}
        answer = {"broadcast_id": broadcast_id, "recipients": len(recipients)}
        return json_answer(answer, verdict=DUPLICATE if verdicts == {DUPLICATE} else ACCEPTED)

    @routes.get(AUDIT, Action.AUDIT_READ, AuditAnswer)
    async def read_audit(wanted: Annotated[AuditFilter, Query()]) -> Response:
        """Show the audit log: the newest delivered messages, and the newest refused requests to send one.

        `limit` is the number of entries, by default the setting `gateway.audit_messages`.
        """
        return json_answer({"entries": hub.audit.newest(wanted.limit)})

    _add_own_mailbox_routes(routes, hub)


def _add_own_mailbox_routes(routes: Routes, hub: Hub) -> None:
    """Add the routes by which callers take or mark the messages of their own mailboxes."""

    @routes.get(MESSAGES, Action.MESSAGE_DRAIN, DrainedAnswer)
    async def drain_messages(
        request: Request, wanted: Annotated[DrainFilter, Query()], request_id: RequestId = None
    ) -> Response:
        """Take at most `limit` messages out of the caller's mailbox, the most urgent first.

        The list is empty when no message waits; the request does not wait for one. Only one drain gets each
        message. The field `left` is the number of messages that still wait. A drain with the `X-Request-ID` of
        an earlier one gets the same messages again.
        """
        return json_answer(await _drained(hub, caller_of(request), wanted.limit, request_id))

    @routes.post(f"{MESSAGES}/read", Action.MESSAGE_MARK, ReadAnswer)
    async def mark_messages_read(write: WriteRequest, body: ReadRequest) -> Response:
        """Mark messages of the caller's own mailbox as read, so that no drain gets them.

        The answer lists the ids that are read now, that could not be marked, and that are unknown. Marking the
        same messages again changes nothing, with or without an idempotency key.
        """
        mailboxes = own_mailboxes(write.caller, hub.settings.gateway.mailbox_per_token)
        marks = await mark_read(hub, mailboxes, body.message_ids, **write.origin)
        read = {*marks.marked, *marks.read_before}
        answer = {
            "read": [one for one in dict.fromkeys(body.message_ids) if one in read],
            "not_marked": marks.not_marked,
            "unknown": marks.unknown,
        }
        return json_answer(answer, verdict=ACCEPTED if marks.marked else DUPLICATE if read else None)


def _check_policy(hub: Hub, caller: Caller, envelope: MessageEnvelope, path: str) -> None:
    per_token = hub.settings.gateway.mailbox_per_token
    decision = evaluate_message(hub.live_view, caller, envelope.recipient, envelope.type, per_token=per_token)
    if decision.allowed:
        return
    route, why = f"POST {path}", why_refused(envelope.model_dump(), decision.reason)
    if not is_known_recipient(hub.live_view, envelope.recipient, per_token=per_token):
        hub.refusals.record(UNKNOWN_RECIPIENT, why, caller.principal, route)
        raise ApiError(404, UNKNOWN_RECIPIENT, decision.reason)
    hub.refusals.record(POLICY, why, caller.principal, route)
    raise ApiError(403, POLICY, decision.reason)


def _message(
    caller: Caller, envelope: MessageEnvelope, message_id: str, broadcast_id: str | None = None
) -> Message:
    content = (envelope.type, canonical(envelope.payload).decode("utf-8"), JSON_CONTENT)
    sides = (caller.principal, envelope.recipient)
    return verified_message(message_id, *sides, *content, from_task=caller.task_id, broadcast_id=broadcast_id)


async def _drained(hub: Hub, caller: Caller, limit: int, key: str | None) -> dict[str, Any]:
    mailboxes = own_mailboxes(caller, hub.settings.gateway.mailbox_per_token)
    request_id = str(request_uuid(caller.requester, None if key is None else f"drain/{key}"))
    mailbox = _mailbox_to_drain(hub, mailboxes, request_id)
    if mailbox is None or (key is not None and len(mailboxes) > 1):
        # Another gateway may have acknowledged a message that is not settled here yet, or may have served the
        # same drain from the other mailbox.
        hub.appender.check()
        await hub.fresh.catch_up()
        mailbox = _mailbox_to_drain(hub, mailboxes, request_id)
    if mailbox is None:
        return {"messages": [], "left": 0}
    record = claim_record(*mailbox, request_id, limit, door=DOOR, principal=caller.principal)
    await hub.appender.settle_accepted(record)
    handed = (
        hub.live_view.get(MessageRow, f"{'/'.join(mailbox)}/{message_id}")
        for message_id in hub.mailboxes.handed(mailbox, request_id)
    )
    rows = [row for row in handed if row is not None and row.request_id == request_id]
    rows.sort(key=lambda row: (_PRIORITY[row.priority], row.posted_at, row.message_id))
    left = sum(hub.mailboxes.depth(one) for one in mailboxes)
    return {"messages": [_shown(hub, row) for row in rows], "left": left}


def _mailbox_to_drain(hub: Hub, mailboxes: Sequence[Mailbox], request_id: str) -> Mailbox | None:
    """Return the mailbox that the request has already drained, else the first one that is not empty.

    One drain is one record, so it takes from one mailbox.
    """
    handed = (one for one in mailboxes if hub.mailboxes.handed(one, request_id))
    waiting = (one for one in mailboxes if hub.mailboxes.depth(one))
    return next(handed, None) or next(waiting, None)


def _address_of_sender(hub: Hub, row: MessageRow) -> str:
    """Return the mailbox that an answer to a message must go to."""
    if not hub.settings.gateway.mailbox_per_token or row.from_task is None:
        return row.sender
    task = hub.live_view.get(TaskRow, row.from_task)
    if task is None or task.token_id is None:
        return row.sender
    return token_mailbox(row.sender, task.token_id)


def _shown(hub: Hub, row: MessageRow) -> dict[str, Any]:
    body = hub.live_view.get(MessageBodyRow, f"{row.realm}/{row.recipient}/{row.message_id}")
    return {
        "id": row.message_id,
        "timestamp": iso_moment(row.posted_at),
        "sender": _address_of_sender(hub, row),
        "recipient": row.recipient,
        "type": row.kind,
        "payload": None if body is None else _payload(body),
    }


def _payload(row: MessageBodyRow) -> Any:
    """Return the body as JSON. A body that is not JSON becomes the `text` of an object."""
    try:
        return orjson.loads(row.body)
    except orjson.JSONDecodeError:
        return {"text": row.body}
