"""The route `POST /messages` (XP-15): puts an XML document into the mailboxes of its listeners.

A document that XP-03 refuses is answered with an error. A fault in the envelope or after it is answered with a
`<huh>` that says what would be right. Both are recorded in the ledger under `refused/http`.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from typing import Annotated, Any, Final
from xml.sax.saxutils import quoteattr

from fastapi import Query, Request, Response
from pydantic import ConfigDict, Field

from connectors.doors.http_api.pump.pump_answers import newest_question, opens_thread, own_thread, place_of
from connectors.doors.http_api.pump.pump_leases import HUMAN
from connectors.hub.reactor.derived_records import XML_CONTENT, XML_DOOR
from connectors.hub.services.conversations import Place, child_thread
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import Routes
from connectors.hub.serving.answers import VERDICT_HEADER, ApiError, refuse_rejected, too_many
from connectors.hub.serving.api_document import EXAMPLES
from connectors.hub.serving.identities import IdempotencyKey, caller_of, request_uuid
from connectors.hub.serving.models import ERRORS, NamedThing
from connectors.hub.serving.policy import Action, Caller, decide
from connectors.hub.serving.strict_request import UNSUPPORTED
from connectors.operations.rules.hub_policy import (
    ROUTING,
    check_limits,
    check_room,
    limited_posting,
    note_full,
    recipients_of,
)
from connectors.operations.rules.message_models import SentMessage
from connectors.plumbing.network.rates import TokenBuckets
from connectors.plumbing.xml_payloads.huh import huh
from connectors.plumbing.xml_wire.documents import Faulty, XmlLimits, XmlRefused
from connectors.plumbing.xml_wire.envelope import OpenedMessage, open_document
from schemas.streams.mailboxes.mailbox_postings import CLOSED
from schemas.streams.mailboxes.message import (
    DEFAULT_REALM,
    REPAIRS_MOST,
    Message,
    MessageRow,
    verified_message,
)
from schemas.streams.principal.principals import ACTIVE
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, MALFORMED, TOO_LARGE

XML_MESSAGES: Final = "/messages"
ACCEPTED_NAMESPACE: Final = "urn:trunkline:pump:1"
# A longer document is parsed on a thread, so that the event loop does not wait for it.
_AT_ONCE_BYTES: Final = 16 * 1024
_TYPES: Final = ("application/xml", "text/xml", "")
_QUESTION: Final = f'<message xmlns="urn:trunkline:envelope:1"><to>calculator</to>{EXAMPLES["body"]}</message>'
_POSTED: Final = (
    f'<accepted xmlns="{ACCEPTED_NAMESPACE}" thread="5b1c0f7e-6d2b-5f19-9a53-5d1f0f0c9d88">'
    '<message id="9f0e5f6d-4f0a-5a3b-8a4c-3d1c5f7b9e21" to="calculator"/></accepted>'
)
_REFUSED: Final = huh("no listener has this name", about_tag="calculate", step=ROUTING).decode("utf-8")


def _xml(example: str) -> dict[str, Any]:
    """Return the description of a body in XML."""
    return {XML_CONTENT: {"schema": {"type": "string"}, "example": example}}


_DOCUMENTED: Final[dict[str, Any]] = {"requestBody": {"required": True, "content": _xml(_QUESTION)}}
_ACCEPTED: Final = (
    "The messages are in the mailboxes: <accepted> with the thread and a message id for each listener. The "
    "listener's pipeline checks the payload later; a fault in it comes as a <huh> into the sender's mailbox."
)
_FAULTY: Final = "A <huh> that names the fault in the envelope, the recipient or the thread."
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    202: {"description": _ACCEPTED, "content": _xml(_POSTED)},
    422: {"description": _FAULTY, "content": _xml(_REFUSED)},
    **ERRORS,
}


class XmlSending(SentMessage):
    """The query parameters of `POST /messages`."""

    # Not strict: in a query, numbers are text.
    model_config = ConfigDict(populate_by_name=True, strict=False)

    sender: Annotated[NamedThing | None, Field(alias="as")] = None
    """Human listener in whose name the operator sends. Without it: the caller."""


def add_xml_routes(routes: Routes, hub: Hub) -> None:
    """Add the route `POST /messages`, which sends an XML document to listeners.

    If the setting `xml_pump.sender_per_minute` is set, each sender has this rate limit.
    """
    per_minute = hub.settings.xml_pump.sender_per_minute
    rates = None if per_minute is None else TokenBuckets[str](per_minute, per_minute / 60)

    @routes.post(
        XML_MESSAGES,
        Action.MESSAGE_SEND,
        status_code=202,
        response_class=Response,
        responses=_ANSWERS,
        openapi_extra=_DOCUMENTED,
    )
    async def send_xml(
        request: Request, asked: Annotated[XmlSending, Query()], key: IdempotencyKey = None
    ) -> Response:
        """Send an XML message to the listener named in its <to>, or to all listeners of its root tag.

        The answer 202 lists the posted messages. An invalid document is answered with 400 or 413. A fault in
        the envelope or its recipient is answered with 422 and a `<huh>`. The status is 429 for a full queue or
        a sender above its rate: with the reason `mailbox_full` or `rate_limited` by the limits of principals.

        The query parameters `priority`, `expires_in_s` and `deliver_after_s` are those of other messages. A
        listener that has not got a message in its time never gets it.
        """
        caller = caller_of(request)
        request_id = str(request_uuid(caller.requester, key))
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() not in _TYPES:
            raise ApiError(415, UNSUPPORTED, "the body must be application/xml")
        sender = _sender(hub, caller, asked.sender)
        wait_s = 0.0 if rates is None else rates.take(sender)
        if wait_s:
            raise too_many("the sender has posted too many messages in a minute", wait_s)
        body = await request.body()
        opened: OpenedMessage | None = None
        try:
            opened = await _opened(hub, body)
            messages = _addressed(hub, sender, opened, body, request_id, asked)
            for message in messages:
                # The messages of a repeated request need no room.
                if hub.mailboxes.mailbox_of(message.message_id) is None:
                    check_room(hub, sender, message.recipient)
                    check_limits(hub, message, f"POST {XML_MESSAGES}")
            messages, verdict = await _posted(hub, messages, caller.principal)
        except XmlRefused as refused:
            raise ApiError(413 if refused.reason == TOO_LARGE else 400, refused.reason, str(refused)) from None
        except Faulty as fault:
            hub.refusals.record(
                MALFORMED, f"<huh>: the {fault.step} check", caller.principal, f"POST {XML_MESSAGES}"
            )
            about = "" if opened is None else opened.root_tag
            told = huh(fault, about_tag=about, step=fault.step)
            return Response(told, 422, media_type=XML_CONTENT)
        return Response(_accepted(messages), 202, {VERDICT_HEADER: verdict}, XML_CONTENT)


def _sender(hub: Hub, caller: Caller, named: str | None) -> str:
    """Return the sender. Raises ApiError (403) for a name that the caller may not use."""
    if named is None:
        return caller.principal
    row = hub.listeners.row(named)
    is_human = row is not None and row.type == HUMAN and row.status == ACTIVE
    if not decide(caller, Action.PUMP_RUN).allowed or not is_human:
        why = "only the operator sends in a listener's name, and only in a human one's"
        raise hub.refusals.forbidden(why, caller.principal, f"POST {XML_MESSAGES}")
    return named


async def _opened(hub: Hub, body: bytes) -> OpenedMessage:
    limits = XmlLimits(document_bytes=hub.settings.limits.payload_bytes)
    if len(body) <= _AT_ONCE_BYTES:
        return open_document(body, limits)
    return await asyncio.to_thread(open_document, body, limits)


def _addressed(
    hub: Hub, sender: str, opened: OpenedMessage, body: bytes, request_id: str, asked: XmlSending
) -> list[Message]:
    """Return one message for each recipient. Raises Faulty."""
    thread = opened.thread or str(uuid.uuid5(uuid.UUID(request_id), "thread"))
    known = place_of(hub, thread)
    also = () if known is None else (known.asker,)
    names = recipients_of(hub, sender, opened.to, opened.root_tag, opened.namespace, also)
    if known is not None and known.seen_by != sender:
        raise Faulty(
            ROUTING, "the thread is not known", expected="a thread that you were given, or no <thread>"
        )
    repaired: dict[str, Any] = {}
    # A sender that names itself was not repaired.
    if len(opened.notes) > (opened.claimed_sender is not None):
        original = base64.b64encode(body).decode("ascii")
        repaired = {"repairs": [note[:500] for note in opened.notes[:REPAIRS_MOST]], "original": original}
    tag, payload = opened.root_tag, opened.payload.decode("utf-8")
    found = []
    for name in names:
        message_id = str(uuid.uuid5(uuid.UUID(request_id), name))
        fields: dict[str, Any] = {
            "thread": child_thread(hub.keyring, thread, sender, name),
            "parent_thread": thread,
            "root_thread": thread,
            "on_behalf_of": sender,
            "broadcast_id": request_id if opened.to is None else None,
            **asked.in_the_log(),
            **repaired,
        }
        if known is not None:
            fields |= {"root_thread": known.root_thread, "on_behalf_of": known.on_behalf_of}
            if name == known.asker:
                fields |= _as_answer(hub, known, thread, message_id)
        if fields["parent_thread"] is not None:
            fields["opens_thread"] = opens_thread(hub, fields["thread"], message_id)
        found.append(verified_message(message_id, sender, name, tag, payload, XML_CONTENT, **fields))
    return found


def _as_answer(hub: Hub, known: Place, thread: str, message_id: str) -> dict[str, Any]:
    """Return the fields of a message to the asker of a thread: it answers the asker's newest message there.

    The asker knows the conversation by the parent thread or, at another door, by the thread that it gave.
    """
    posted = hub.live_view.get(MessageRow, f"{DEFAULT_REALM}/{known.asker}/{message_id}")
    if posted is not None:  # a repeated request is the same message, also if the asker has asked again since
        names = ("thread", "parent_thread", "in_reply_to")
        return {name: getattr(posted, name) for name in names}
    question = newest_question(hub, thread, known.asker, known.seen_by)
    if question is None:
        return {} if known.parent_thread is None else {"thread": known.parent_thread, "parent_thread": None}
    about = {"thread": known.parent_thread or own_thread(question), "parent_thread": None}
    return {**about, "in_reply_to": question.message_id}


async def _posted(hub: Hub, messages: list[Message], principal: str) -> tuple[list[Message], str]:
    """Post all messages.

    Returns: The posted messages, without those to listeners that were removed at this moment, and the common
        verdict.

    Raises:
        ApiError: The fold rejected a message.
        Faulty: All listeners were removed.
    """
    records = [limited_posting(hub, message, door=XML_DOOR, principal=principal) for message in messages]
    verdicts, posted = set(), []
    async with hub.under_way.one(principal):
        all_settled = await hub.appender.settle_all(records)
    for message, settled in zip(messages, all_settled, strict=True):
        if settled.why == CLOSED:
            continue
        note_full(hub, message, settled)
        verdicts.add(refuse_rejected(settled).verdict)
        posted.append(message)
    if not posted:
        raise Faulty(ROUTING, "the listener was removed a moment ago", expected="another listener")
    return posted, DUPLICATE if verdicts == {DUPLICATE} else ACCEPTED


def _accepted(messages: list[Message]) -> bytes:
    thread = messages[0].parent_thread or messages[0].thread or ""
    rows = "".join(
        f"<message id={quoteattr(message.message_id)} to={quoteattr(message.recipient)}/>"
        for message in messages
    )
    shown = f'<accepted xmlns="{ACCEPTED_NAMESPACE}" thread={quoteattr(thread)}>{rows}</accepted>'
    return shown.encode("utf-8")
