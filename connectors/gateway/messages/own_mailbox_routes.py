"""The HTTP routes by which callers take, acknowledge, mark and follow their own messages (HH-06, DL-01 to 03).

To take messages is a claim or a lease in the mailbox's stream. The first one in the log gets a message,
whatever the number of gateways, and a repeated request id gets the same messages.
"""

from __future__ import annotations

from fastapi import Request, Response

from connectors.gateway.messages.mailbox_stream import EncodedMessages, mailbox_events
from connectors.gateway.messages.message_operations import MESSAGES
from connectors.gateway.rules.message_models import (
    ReadAnswer,
    ReadRequest,
)
from connectors.gateway.rules.read_marks import mark_read
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import own_mailboxes
from connectors.gateway.web.admission import Gate, Routes
from connectors.gateway.web.answers import json_answer
from connectors.gateway.web.idempotency import WriteRequest, caller_of
from connectors.gateway.web.models import ERRORS
from connectors.gateway.web.policy import Action
from connectors.gateway.web.refusals import DOOR
from connectors.gateway.web.streaming_answer import EVENT_STREAM, LastEventId
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE


def add_read_route(routes: Routes, hub: Hub) -> None:
    """Add the route by which callers mark messages of their own mailboxes as read."""
    per_token = hub.settings.gateway.mailbox_per_token

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


def add_follow_route(routes: Routes, hub: Hub, gate: Gate) -> None:
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
