"""The HTTP routes by which callers take, acknowledge, mark and follow their own messages (HH-06, DL-01 to 03).

To take messages is a claim or a lease in the mailbox's stream. The first one in the log gets a message,
whatever the number of gateways, and a repeated request id gets the same messages.
"""

from __future__ import annotations

import sys
import uuid
from functools import partial
from typing import Annotated, Any

from fastapi import Header, Query, Request, Response

from connectors.gateway.messages.deliveries import LeaseEnds, RecordOf, Taking, change_leases, take_messages
from connectors.gateway.messages.mailbox_stream import EncodedMessages, mailbox_events
from connectors.gateway.messages.message_routes import MESSAGES
from connectors.gateway.messages.shown_messages import message_as_json
from connectors.gateway.rules.message_models import (
    AckRequest,
    DrainedAnswer,
    DrainFilter,
    ExtendedAnswer,
    ExtendRequest,
    LeaseEndAnswer,
    NackRequest,
    ReadAnswer,
    ReadRequest,
)
from connectors.gateway.rules.read_marks import mark_read
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import own_mailboxes
from connectors.gateway.web.admission import Gate, Routes
from connectors.gateway.web.answers import encoded_within, json_answer
from connectors.gateway.web.idempotency import Write, WriteRequest, caller_of, request_uuid
from connectors.gateway.web.models import ERRORS
from connectors.gateway.web.policy import Action
from connectors.gateway.web.refusals import DOOR
from connectors.gateway.web.streaming_answer import EVENT_STREAM, LastEventId
from schemas.streams.mailboxes.mailbox_requests import ack_record, extension_record, nack_record
from schemas.streams.mailboxes.message import MessageRow
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

RequestId = Annotated[
    str | None,
    Header(
        alias="X-Request-ID",
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="A request with an id that was used before is the same request and gets the same messages.",
    ),
]
"""The header, 1 to 255 visible ASCII characters."""


def add_own_mailbox_routes(routes: Routes, hub: Hub, gate: Gate) -> None:
    """Add the routes by which callers take, acknowledge, mark and follow the messages of their own mailboxes.

    Called once, when the gateway starts. During a wait or a stream, `gate` checks whether the client's token is
    still valid. If not, the wait or the stream ends.
    """
    per_token = hub.settings.gateway.mailbox_per_token

    @routes.get(MESSAGES, Action.MESSAGE_DRAIN, DrainedAnswer)
    async def drain_messages(
        request: Request, wanted: Annotated[DrainFilter, Query()], request_id: RequestId = None
    ) -> Response:
        """Take at most `limit` messages out of the caller's mailbox, the most urgent first.

        The list is empty when no message waits. With `wait`, the request waits up to so many seconds for the
        first one. Only one request gets each message. The bodies of one answer have `limits.answer_bytes` at
        most, unless there is only one. The field `left` is the number of messages that still wait. A request
        with the `X-Request-ID` of an earlier one gets the same messages again.

        With `lease`, the messages are leased for so many seconds. A message that is not acknowledged in this
        time (`ack`) is handed out again, before newer ones of its priority. It is dead when it was handed out
        `gateway.max_attempts` times.
        """
        caller = caller_of(request)
        named = None if request_id is None else f"drain/{request_id}"
        taking = Taking(
            mailboxes=own_mailboxes(caller, per_token),
            origin={"door": DOOR, "principal": caller.principal},
            made=request_uuid(caller.requester, named),
            is_repeatable=named is not None,
            limit=wanted.limit,
            bytes_most=hub.settings.limits.answer_bytes,
            lease_s=wanted.lease,
            wait_s=wanted.wait,
        )
        # A lease comes back by itself from a client that has gone.
        is_gone = partial(gate.is_gone, request, is_probed=wanted.lease is None)
        taken = await take_messages(hub, taking, is_gone)
        now_us = hub.log_clock.now_us()
        # All of them: the log has handed them out within the limit of bytes.
        shown = encoded_within((message_as_json(hub, row) for row in taken.rows), sys.maxsize)
        answer: dict[str, Any] = {
            "messages": shown,
            "left": sum(hub.mailboxes.ready(one, now_us) for one in taking.mailboxes),
        }
        if wanted.lease is not None and taken.request_id is not None:
            answer["lease_id"] = taken.request_id
        return json_answer(answer)

    @routes.post(f"{MESSAGES}/read", Action.MESSAGE_MARK, ReadAnswer)
    async def mark_messages_read(write: WriteRequest, body: ReadRequest) -> Response:
        """Mark messages of the caller's own mailbox as read, so that no drain gets them.

        The answer lists the ids that are read now, that could not be marked, and that are unknown. Marking the
        same messages again changes nothing, with or without an idempotency key.
        """
        mailboxes = own_mailboxes(write.caller, per_token)
        marks = await mark_read(hub, mailboxes, body.message_ids, **write.origin)
        read = {*marks.marked, *marks.read_before}
        answer = {
            "read": [one for one in dict.fromkeys(body.message_ids) if one in read],
            "not_marked": marks.not_marked,
            "unknown": marks.unknown,
        }
        return json_answer(answer, verdict=ACCEPTED if marks.marked else DUPLICATE if read else None)

    _add_lease_routes(routes, hub)
    _add_follow_route(routes, hub, gate)


def _add_follow_route(routes: Routes, hub: Hub, gate: Gate) -> None:
    """Add the route that streams the messages of the caller's own mailboxes."""
    per_token = hub.settings.gateway.mailbox_per_token
    places, encoded = hub.new_stream_places(DOOR), EncodedMessages(hub)

    @routes.get(
        f"{MESSAGES}/events",
        Action.MESSAGE_DRAIN,
        response_class=Response,
        responses={200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}, **ERRORS},
    )
    async def follow_messages(request: Request, last_event_id: LastEventId = None) -> Response:
        """Stream the messages of the caller's own mailbox as server-sent events `message`, oldest first.

        The stream begins with the messages that wait. With the header `Last-Event-ID` it begins after that
        event, also at another gateway. It takes no message: mark a message as read when it is done.
        """
        caller = caller_of(request)
        mailboxes = own_mailboxes(caller, per_token)

        def goes_on() -> bool:
            return not hub.stopping.is_set() and gate.still_holds(request)

        return places.answer(
            caller,
            lambda reserve: mailbox_events(encoded, mailboxes, last_event_id, goes_on, reserve),
            EVENT_STREAM,
        )


def _add_lease_routes(routes: Routes, hub: Hub) -> None:
    """Add the routes by which the holder of a lease ends or extends it, for some or all of its messages."""

    async def changed(write: Write, body: AckRequest, record_of: RecordOf) -> LeaseEnds:
        mailboxes = own_mailboxes(write.caller, hub.settings.gateway.mailbox_per_token)
        return await change_leases(hub, mailboxes, body.message_ids, record_of)

    @routes.post(f"{MESSAGES}/ack", Action.MESSAGE_DRAIN, LeaseEndAnswer)
    async def acknowledge_messages(write: WriteRequest, body: AckRequest) -> Response:
        """Acknowledge leased messages, so that they are never handed out again.

        It also works after the end of the lease, until a message is handed out again. `refused` lists the
        messages of which the caller no longer has the lease. Acknowledging again changes nothing.
        """
        ends = await changed(
            write,
            body,
            lambda mailbox, one: ack_record(*mailbox, one, body.lease_id, **write.origin),
        )
        return json_answer(_shown(ends), verdict=_verdict(ends))

    @routes.post(f"{MESSAGES}/nack", Action.MESSAGE_DRAIN, LeaseEndAnswer)
    async def give_back_messages(write: WriteRequest, body: NackRequest) -> Response:
        """Give leased messages back, to be handed out again at once, or to be dead after the last attempt.

        `reason` is shown with a message that is dead. `refused` lists the messages of which the caller no
        longer has the lease. Giving a message back again changes nothing.
        """
        ends = await changed(
            write,
            body,
            lambda mailbox, one: nack_record(*mailbox, one, body.lease_id, body.reason, **write.origin),
        )
        return json_answer(_shown(ends), verdict=_verdict(ends))

    @routes.post(f"{MESSAGES}/extend", Action.MESSAGE_DRAIN, ExtendedAnswer)
    async def extend_lease(write: WriteRequest, body: ExtendRequest) -> Response:
        """Set a new end for the lease of messages, `lease` seconds from now.

        `refused` lists the messages of which the caller no longer has the lease. A request that is repeated
        with the same idempotency key changes nothing.
        """
        ends = await changed(
            write,
            body,
            lambda mailbox, one: extension_record(
                *mailbox,
                one,
                body.lease_id,
                body.lease * 1000,
                ce_id=str(uuid.uuid5(write.made, one)),
                **write.origin,
            ),
        )
        return json_answer({**_shown(ends), "deadline": _deadline(hub, write, ends)}, verdict=_verdict(ends))


def _shown(ends: LeaseEnds) -> dict[str, Any]:
    refused = [
        {"message_id": one, "reason": reason, "message": why} for one, (reason, why) in ends.refused.items()
    ]
    return {"done": ends.done, "refused": refused}


def _verdict(ends: LeaseEnds) -> str | None:
    return ACCEPTED if ends.is_new else DUPLICATE if ends.done else None


def _deadline(hub: Hub, write: Write, ends: LeaseEnds) -> str | None:
    """Return the earliest end of the leases of these messages as text, or None without a message."""
    mailboxes = own_mailboxes(write.caller, hub.settings.gateway.mailbox_per_token)
    rows = [
        hub.live_view.get(MessageRow, "/".join((*mailbox, one))) for one in ends.done for mailbox in mailboxes
    ]
    found = [row.lease_until for row in rows if row is not None and row.lease_until is not None]
    return iso_moment(min(found)) if found else None
