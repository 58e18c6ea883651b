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
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import orjson

from connectors.gateway.messages.shown_messages import message_as_json
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import Mailbox
from connectors.gateway.web.streaming_answer import PING, server_event
from schemas.streams.mailboxes.message import MessageRow

PING_S: Final = 15.0
# How often a silent stream looks whether its client may still read.
_TICK_S: Final = 5.0
_BATCH: Final = 100
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


async def mailbox_events(
    hub: Hub, mailboxes: Sequence[Mailbox], last_event_id: str | None, goes_on: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield the bytes of the events of one client: its pending messages, then each new one, with pings.

    Args:
        hub: The hub.
        mailboxes: The client's own mailboxes.
        last_event_id: The id of the last event that the client received before; None for a new client.
        goes_on: Called every few seconds. The stream ends when it returns False.
    """
    places, silent_since = places_of(last_event_id, len(mailboxes)), time.monotonic()
    with hub.mailbox_waits.waiting(mailboxes, is_taker=False) as wait:
        while goes_on():
            wait.clear()
            if chunk := _next_events(hub, mailboxes, places):
                yield chunk
                silent_since = time.monotonic()
                continue
            if time.monotonic() - silent_since >= PING_S:
                yield PING
                silent_since = time.monotonic()
            await wait.wait(_TICK_S)


def _next_events(hub: Hub, mailboxes: Sequence[Mailbox], places: list[int]) -> bytes:
    """Return the next events, and move `places` behind them. The result is empty if no message has come."""
    events = []
    for number, mailbox in enumerate(mailboxes):
        for message_id in hub.mailboxes.posted_after(mailbox, places[number])[:_BATCH]:
            row = hub.live_view.get(MessageRow, "/".join((*mailbox, message_id)))
            if row is not None:
                places[number] = row.posted_at
                event_id = "-".join(map(str, places))
                events.append(server_event("message", event_id, orjson.dumps(message_as_json(hub, row))))
    return b"".join(events)
