"""The server-sent events of a mailbox: each message once, in the order of posting (DL-02).

The id of an event is the place of the last message in each of the client's mailboxes: the time at which it was
posted, which the fold makes unique within the mailbox. It is the same at every gateway and after every restart.
A client therefore goes on at any gateway where it stopped at another one.

**Delivers** each message at least once to a client that goes on with its last event id, unless the message was
taken or read meanwhile. Reading an event takes no message: the client marks it as read.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import orjson
from fastapi import Request, Response

from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.services.mailboxes import own_mailboxes
from connectors.hub.serving.admission import Gate, Routes
from connectors.hub.serving.answers import DOOR
from connectors.hub.serving.identities import caller_of
from connectors.hub.serving.models import ERRORS
from connectors.hub.serving.policy import Action
from connectors.hub.serving.streaming_answer import (
    CHUNK_BYTES,
    EVENT_STREAM,
    PING,
    LastEventId,
    Reserve,
    server_event,
)
from connectors.operations.messages.message_operations import MESSAGES
from connectors.operations.messages.shown_messages import message_as_json
from schemas.streams.mailboxes.message import MessageBodyRow, MessageRow

PING_S: Final = 15.0
# How often a silent stream looks whether its client may still read.
_TICK_S: Final = 5.0
_BATCH: Final = 100
# The most bytes of the encoded messages that are kept for further readers.
_ENCODED_BYTES: Final = 16 * 1024 * 1024
_ID: Final = re.compile(r"\d{1,18}(?:-\d{1,18})*")


def places_of(last_event_id: str | None, count: int) -> list[int]:
    """Return the place after which the stream of each mailbox goes on; 0 begins with its oldest message.

    Args:
        last_event_id: The header `Last-Event-ID`. A text that is no id of an event counts as None.
        count: The number of mailboxes.
    """
    if last_event_id is None or _ID.fullmatch(last_event_id) is None:
        return [0] * count
    places = [int(place) for place in last_event_id.split("-")]
    return places if len(places) == count else [0] * count


class EncodedMessages:
    """The messages of a gateway's mailboxes as JSON, each encoded once for all its readers. Not thread-safe.

    Args:
        hub: The hub. It is an attribute, too.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._kept: OrderedDict[str, tuple[MessageRow, bytes]] = OrderedDict()
        self._bytes = 0

    async def of(self, row: MessageRow, reserve: Reserve) -> bytes:
        """Return a message as JSON. `reserve` waits for the memory of a long one."""
        key = f"{row.realm}/{row.recipient}/{row.message_id}"
        kept = self._kept.get(key)
        if kept is not None and kept[0] == row:
            await reserve(len(kept[1]))
            return kept[1]
        body = self.hub.live_view.get(MessageBodyRow, key)
        await reserve(0 if body is None else len(body.body))
        encoded = orjson.dumps(message_as_json(self.hub, row))
        self._bytes += len(encoded) - (0 if (before := self._kept.pop(key, None)) is None else len(before[1]))
        self._kept[key] = (row, encoded)
        while self._bytes > _ENCODED_BYTES:
            self._bytes -= len(self._kept.popitem(last=False)[1][1])
        return encoded


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


async def mailbox_events(
    encoded: EncodedMessages,
    mailboxes: Sequence[Mailbox],
    last_event_id: str | None,
    goes_on: Callable[[], bool],
    reserve: Reserve,
) -> AsyncIterator[bytes]:
    """Yield the bytes of the events of one client: its pending messages, then each new one, with pings.

    Args:
        encoded: The messages of the gateway.
        mailboxes: The client's own mailboxes.
        last_event_id: The id of the last event that the client received before; None for a new client.
        goes_on: Called every few seconds. The stream ends when it returns False.
        reserve: Waits for the memory of an event.
    """
    places, silent_since = places_of(last_event_id, len(mailboxes)), time.monotonic()
    with encoded.hub.mailbox_waits.waiting(mailboxes, is_taker=False) as wait:
        while goes_on():
            wait.clear()
            is_silent = True
            async for chunk in _next_chunks(encoded, mailboxes, places, reserve):
                is_silent = False
                yield chunk
                if not goes_on():
                    return
            if not is_silent:
                silent_since = time.monotonic()
                continue
            if time.monotonic() - silent_since >= PING_S:
                yield PING
                silent_since = time.monotonic()
            await wait.wait(_TICK_S)


async def _next_chunks(
    encoded: EncodedMessages, mailboxes: Sequence[Mailbox], places: list[int], reserve: Reserve
) -> AsyncIterator[bytes]:
    """Yield the next events, and move `places` behind them. A long event ends its chunk."""
    for number, mailbox in enumerate(mailboxes):
        chunk = b""
        for message_id in encoded.hub.mailboxes.posted_after(mailbox, places[number])[:_BATCH]:
            row = encoded.hub.live_view.get(MessageRow, "/".join((*mailbox, message_id)))
            if row is None:
                continue
            places[number] = row.posted_at
            event_id = "-".join(map(str, places))
            chunk += server_event("message", event_id, await encoded.of(row, reserve))
            if len(chunk) >= CHUNK_BYTES:
                yield chunk
                chunk = b""
        if chunk:
            yield chunk
