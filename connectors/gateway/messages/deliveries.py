"""Hands messages of a mailbox out to its owner, for good or under a lease, and waits for them (DL-01, DL-03).

**Delivers** a leased message at least once: until its holder acknowledges it or it is dead. **Delivers** a
message that is taken for good at most once; a request that is repeated with the same id gets the same messages.
**Loses** nothing silently: an error leaves the messages in the mailbox, or the repeated request gets them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import Mailbox
from connectors.gateway.web.answers import unavailable
from connectors.gateway.web.idempotency import Origin
from schemas.streams.mailboxes.mailbox_requests import claim_record, lease_record
from schemas.streams.mailboxes.message import LEASED, PRIORITIES, MessageRow
from schemas.wire.record import OutgoingRecord
from schemas.wire.verdicts import ACCEPTED, REJECTED, UNKNOWN_STREAM

# Another consumer may be faster, so one request may have to ask the log again. Each time has an id of its own.
_ATTEMPTS: Final = 32
_PLACE: Final = {priority: place for place, priority in enumerate(PRIORITIES)}

IsGone = Callable[[], Awaitable[bool]]
"""Returns whether the client has disconnected, so that nobody would get the messages."""


@dataclass(frozen=True)
class Taking:
    """A request for messages.

    Attributes:
        mailboxes: The mailboxes to take from. All messages come from one of them, the first that has any.
        origin: The door and the principal of the records.
        made: The UUID of the request. A repeated request has the same one.
        is_repeatable: Whether a request with this UUID may have been made before.
        limit: The largest number of messages.
        lease_s: The duration of the lease in seconds. None takes the messages for good.
        wait_s: How many seconds to wait for the first message.
    """

    mailboxes: Sequence[Mailbox]
    origin: Origin
    made: uuid.UUID
    is_repeatable: bool
    limit: int
    lease_s: int | None = None
    wait_s: float = 0

    def request_id(self, attempt: int) -> str:
        """Return the id of the record that this request appends at an attempt, the first of which is 0."""
        return str(uuid.uuid5(self.made, str(attempt)) if attempt else self.made)


@dataclass(frozen=True)
class Taken:
    """The messages that a request got, most urgent first, and the id of their claim or lease.

    Without messages the id is None.
    """

    rows: Sequence[MessageRow] = ()
    request_id: str | None = None


async def never_gone() -> bool:
    """Return False, as an `IsGone` for callers that cannot tell whether their client has disconnected."""
    return False


async def take_messages(hub: Hub, taking: Taking, is_gone: IsGone = never_gone) -> Taken:
    """Hand out messages to the owner of a mailbox. Wait up to `taking.wait_s` seconds for the first one.

    The result is empty if the time has passed, or if the client has disconnected. A repeated request gets the
    messages that it got before; of a lease, only those that are still leased.

    Args:
        hub: The hub.
        taking: The request.
        is_gone: Tells a client that has disconnected during the wait. By default, none does.

    Raises:
        ApiError: 409 if a request with this UUID asked for something else, 503 if the gateway stops.
        BackboneUnreachable: Kafka is unreachable, or the record was not settled in time. The same request may
            be made again.
    """
    deadline = time.monotonic() + taking.wait_s
    is_fresh = taking.is_repeatable
    if is_fresh:
        # Another gateway may have served the same request.
        await _catch_up(hub)
        if (earlier := _earlier(hub, taking)) is not None:
            return (await _ask(hub, taking, *earlier))[0]
    attempt = 0
    with hub.mailbox_waits.waiting(taking.mailboxes, is_taker=True) as wait:
        while True:
            wait.clear()
            now_us = time.time_ns() // 1000
            mailbox = next((one for one in taking.mailboxes if hub.mailboxes.ready(one, now_us)), None)
            if mailbox is not None:
                taken, is_lost = await _ask(hub, taking, mailbox, taking.request_id(attempt))
                attempt += 1
                if not is_lost or attempt == _ATTEMPTS:
                    return taken
                continue
            if not is_fresh:
                # Another gateway may have acknowledged a message that is not settled here yet.
                await _catch_up(hub)
                is_fresh = True
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not await wait.wait(left) or await is_gone():
                return Taken()
            if hub.stopping.is_set():
                raise unavailable("the gateway stops; ask another one")


async def _catch_up(hub: Hub) -> None:
    hub.appender.check()
    await hub.fresh.catch_up()


def _earlier(hub: Hub, taking: Taking) -> tuple[Mailbox, str] | None:
    """Return the mailbox from which this request got messages when it was made before, and the record's id."""
    for attempt in range(_ATTEMPTS):
        request_id = taking.request_id(attempt)
        for mailbox in taking.mailboxes:
            if hub.mailboxes.handed(mailbox, request_id):
                return mailbox, request_id
    return None


async def _ask(hub: Hub, taking: Taking, mailbox: Mailbox, request_id: str) -> tuple[Taken, bool]:
    """Ask the log for messages. Return those that it gave, and whether all went to other consumers."""
    if taking.lease_s is None:
        record = claim_record(*mailbox, request_id, taking.limit, **taking.origin)
    else:
        attempts, lease_ms = hub.settings.gateway.max_attempts, taking.lease_s * 1000
        record = lease_record(
            *mailbox, request_id, taking.limit, lease_ms, attempts_most=attempts, **taking.origin
        )
    settled = await hub.appender.settle_accepted(record)
    handed = (
        hub.live_view.get(MessageRow, f"{'/'.join(mailbox)}/{message_id}")
        for message_id in hub.mailboxes.handed(mailbox, request_id)
    )
    rows = [row for row in handed if row is not None and row.request_id == request_id]
    if taking.lease_s is not None:
        rows = [row for row in rows if row.status == LEASED]
    if not rows:
        return Taken(), settled.verdict == ACCEPTED
    rows.sort(key=lambda row: (_PLACE[row.priority], row.posted_at, row.message_id))
    return Taken(rows, request_id), False


@dataclass(frozen=True)
class LeaseEnds:
    """The result of a request about leased messages.

    Attributes:
        done: The ids of the messages that were changed, by this request or the same one before.
        refused: For each other id the reason, a stable code, and an explanation.
        is_new: Whether this request changed anything.
    """

    done: list[str]
    refused: dict[str, tuple[str, str]]
    is_new: bool


RecordOf = Callable[[Mailbox, str], OutgoingRecord]
"""Returns the record about one leased message, from its mailbox and its id."""


async def change_leases(
    hub: Hub, mailboxes: Sequence[Mailbox], message_ids: Sequence[str], record_of: RecordOf
) -> LeaseEnds:
    """Append one record for each leased message, wait until all are settled, and return the result.

    Args:
        hub: The hub.
        mailboxes: The caller's own mailboxes. Messages in other mailboxes count as unknown.
        message_ids: The ids of the messages. An id that occurs twice counts once.
        record_of: Makes the record of an ack, a nack or an extension.

    Raises:
        BackboneUnreachable: Kafka is unreachable, or a record was not settled in time. Some records may be
            settled. The same request may be made again.
    """
    wanted = list(dict.fromkeys(message_ids))
    places = _places(hub, mailboxes, wanted)
    if len(places) < len(wanted):
        await _catch_up(hub)
        places = _places(hub, mailboxes, wanted)
    settled = await hub.appender.settle_all(record_of(place, one) for one, place in places.items())
    found = dict(zip(places, settled, strict=True))
    refused = {
        one: (str(record.reason), str(record.why))
        for one, record in found.items()
        if record.verdict == REJECTED
    }
    unknown = {one: (UNKNOWN_STREAM, "no such message in this mailbox") for one in wanted if one not in found}
    return LeaseEnds(
        done=[one for one in found if one not in refused],
        refused={one: why for one in wanted if (why := {**unknown, **refused}.get(one)) is not None},
        is_new=any(record.verdict == ACCEPTED for record in settled),
    )


def _places(hub: Hub, mailboxes: Sequence[Mailbox], message_ids: Sequence[str]) -> dict[str, Mailbox]:
    """Return for each known message the mailbox among these that has it."""
    return {
        one: mailbox
        for one in message_ids
        for mailbox in mailboxes
        if hub.live_view.get(MessageRow, "/".join((*mailbox, one))) is not None
    }
