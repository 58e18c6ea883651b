"""The messages of the hub (HH-06, HH-08): send, drain, and the audit log of both.

Draining is a claim in the mailbox's stream: the first in the log gets a message, whatever the number of
gateways, and the same request id again gets the same messages.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import orjson
from fastapi import FastAPI, Header, Query, Request, Response

from connectors.gateway.admission import asks_for
from connectors.gateway.answers import ApiError, iso_moment, json_answer, refuse_rejected
from connectors.gateway.hub import Hub
from connectors.gateway.hub_models import (
    AuditAnswer,
    AuditFilter,
    DeliveredAnswer,
    DrainedAnswer,
    DrainFilter,
    MessageEnvelope,
)
from connectors.gateway.hub_policy import evaluate_message, is_known_recipient
from connectors.gateway.idempotency import IdempotencyKey, request_uuid
from connectors.gateway.models import ERRORS
from connectors.gateway.policy import Action, Caller
from connectors.gateway.refusals import DOOR
from schemas.mailbox_requests import claim_record
from schemas.message import DEFAULT_REALM, PRIORITIES, Message, posting_record
from schemas.record import JSON_CONTENT
from schemas.strict_json import canonical
from schemas.verdicts import POLICY, SEQ_CONFLICT, UNKNOWN_RECIPIENT
from schemas.view_rows import MAILBOX_VIEW, MESSAGE_BODIES, MessageBodyRow, MessageRow

MESSAGES: Final = "/api/hub/messages"
AUDIT: Final = "/api/hub/audit"
_PRIORITY: Final = {priority: place for place, priority in enumerate(PRIORITIES)}

RequestId = Annotated[
    str | None,
    Header(
        alias="X-Request-ID",
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="The same id again is the same drain, and gets the same messages.",
    ),
]
"""The header, 1 to 255 visible ASCII characters."""


def add_message_routes(app: FastAPI, hub: Hub) -> None:
    """Add the routes under `/api/hub/messages`, and `/api/hub/audit`."""

    @app.post(MESSAGES, response_model=DeliveredAnswer, responses=ERRORS)
    @asks_for(Action.MESSAGE_SEND)
    async def send_message(request: Request, body: MessageEnvelope, key: IdempotencyKey = None) -> Response:
        """Put a message into its recipient's mailbox."""
        caller: Caller = request.state.caller
        _check_policy(hub, caller, body)
        message = _message(caller, body, str(request_uuid(caller.principal, key)))
        known = hub.mailboxes.mailbox_of(message.message_id)
        if known is not None and known != (message.realm, message.recipient):
            # Each mailbox knows its own ids alone.
            raise ApiError(409, SEQ_CONFLICT, "this idempotency key was used for another recipient")
        record = posting_record(message, door=DOOR, principal=caller.principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        answer = {"delivered": True, "message_id": message.message_id}
        return json_answer(answer, verdict=settled.verdict)

    @app.get(MESSAGES, response_model=DrainedAnswer, responses=ERRORS)
    @asks_for(Action.MESSAGE_DRAIN)
    async def drain_messages(
        request: Request, wanted: Annotated[DrainFilter, Query()], request_id: RequestId = None
    ) -> Response:
        """Take the messages out of the caller's mailbox: each goes to one drain."""
        caller: Caller = request.state.caller
        return json_answer(await _drained(hub, caller, wanted.limit, request_id))

    @app.get(AUDIT, response_model=AuditAnswer, responses=ERRORS)
    @asks_for(Action.AUDIT_READ)
    async def read_audit(wanted: Annotated[AuditFilter, Query()]) -> Response:
        """Show the newest messages that were delivered, and requests to send one that were refused."""
        return json_answer({"entries": hub.audit.newest(wanted.limit)})


def _check_policy(hub: Hub, caller: Caller, envelope: MessageEnvelope) -> None:
    decision = evaluate_message(hub.live_view, caller, envelope.recipient, envelope.type)
    if decision.allowed:
        return
    route = f"POST {MESSAGES}"
    if not is_known_recipient(hub.live_view, envelope.recipient):
        hub.refusals.record(UNKNOWN_RECIPIENT, decision.reason, caller.principal, route)
        raise ApiError(404, UNKNOWN_RECIPIENT, decision.reason)
    hub.refusals.record(POLICY, decision.reason, caller.principal, route)
    raise ApiError(403, POLICY, decision.reason)


def _message(caller: Caller, envelope: MessageEnvelope, message_id: str) -> Message:
    return Message.model_validate(
        {
            "message_id": message_id,
            "from": caller.principal,
            "from_verified": True,
            "from_task": caller.task_id,
            "to": envelope.recipient,
            "kind": envelope.type,
            "body": canonical(envelope.payload).decode("utf-8"),
            "content_type": JSON_CONTENT,
        }
    )


async def _drained(hub: Hub, caller: Caller, limit: int, key: str | None) -> dict[str, Any]:
    mailbox = (DEFAULT_REALM, caller.principal)
    request_id = str(request_uuid(caller.principal, None if key is None else f"drain/{key}"))
    if not hub.mailboxes.depth(mailbox) and not hub.mailboxes.handed(mailbox, request_id):
        # Perhaps another gateway has just answered for a message that is not settled here yet.
        await hub.fresh.catch_up()
    if hub.mailboxes.depth(mailbox) or hub.mailboxes.handed(mailbox, request_id):
        record = claim_record(*mailbox, request_id, limit, door=DOOR, principal=caller.principal)
        refuse_rejected(await hub.appender.settle(record))
    handed = [
        hub.live_view.row(MAILBOX_VIEW, f"{'/'.join(mailbox)}/{message_id}")
        for message_id in hub.mailboxes.handed(mailbox, request_id)
    ]
    rows = [row for row in handed if isinstance(row, MessageRow) and row.request_id == request_id]
    rows.sort(key=lambda row: (_PRIORITY[row.priority], row.posted_at, row.message_id))
    return {"messages": [_shown(hub, row) for row in rows], "left": hub.mailboxes.depth(mailbox)}


def _shown(hub: Hub, row: MessageRow) -> dict[str, Any]:
    body = hub.live_view.row(MESSAGE_BODIES, f"{row.realm}/{row.recipient}/{row.message_id}")
    return {
        "id": row.message_id,
        "timestamp": iso_moment(row.posted_at),
        "sender": row.sender,
        "recipient": row.recipient,
        "type": row.kind,
        "payload": _payload(body) if isinstance(body, MessageBodyRow) else None,
    }


def _payload(row: MessageBodyRow) -> Any:
    """The body as JSON; text of another door in an object of its own."""
    try:
        return orjson.loads(row.body)
    except orjson.JSONDecodeError:
        return {"text": row.body}
