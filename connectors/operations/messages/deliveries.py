"""Hands messages of a mailbox out to its owner, for good or under a lease, and waits for them or for a reply.

**Delivers** a leased message at least once: until its holder acknowledges it or it is dead. **Delivers** a
message that is taken for good at most once; a request that is repeated with the same id gets the same messages.
**Loses** nothing silently: an error leaves the messages in the mailbox, or the repeated request gets them.

**Delivers** a reply (DL-07) once: either as the answer of the request that waits, or in the mailbox. A request
that is repeated with the same idempotency key gets the reply again. A leased reply comes again unless it is
acked.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox, MailboxWait, same_request
from connectors.hub.serving.answers import encoded_within, unavailable
from connectors.hub.serving.identities import Origin
from connectors.operations.messages.shown_messages import address_of_sender, message_as_json, reserve_answer
from schemas.streams.mailboxes.mailbox_bodies import LIMIT_MOST, MailboxClaim, MailboxLease
from schemas.streams.mailboxes.message import CLAIMED, LEASED, PRIORITIES, UNREAD, MessageRow
from schemas.streams.principal.principals import HUB
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import WireBody
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED, UNKNOWN_STREAM

# Another consumer may be faster, so one request may have to ask the log again. Each time has an id of its own.
ATTEMPTS: Final = 32
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
        bytes_most: The largest number of bytes of their bodies. One message comes in any case.
        lease_s: The duration of the lease in seconds. None takes the messages for good.
        wait_s: How many seconds to wait for the first message.
        attempts_most: How often each message may be leased before it is dead. None: `gateway.max_attempts`.
        asks_most: How often to ask the log while other readers are faster, at most 32. Each time is a record.
    """

    mailboxes: Sequence[Mailbox]
    origin: Origin
    made: uuid.UUID
    is_repeatable: bool
    limit: int
    bytes_most: int
    lease_s: int | None = None
    wait_s: float = 0
    attempts_most: int | None = None
    asks_most: int = ATTEMPTS

    @property
    def request(self) -> str | None:
        """The part that all ids of this request have in common. None: it cannot have been made before."""
        return same_request(str(self.made)) if self.is_repeatable else None

    def request_id(self, attempt: int) -> str:
        """Return the id of the record that this request appends at an attempt, the first of which is 0."""
        made = str(self.made)
        return f"{same_request(made)}{int(made[-2:], 16) ^ attempt:02x}"


@dataclass(frozen=True)
class Taken:
    """The messages that a request got, most urgent first, and the id of their claim or lease.

    Without messages the id is None.
    """

    rows: Sequence[MessageRow] = ()
    request_id: str | None = None


async def never_gone(*, is_probed: bool = False) -> bool:
    """Return False, as an `IsGone` for callers that cannot tell whether their client has disconnected."""
    return False


async def take_messages(hub: Hub, taking: Taking, is_gone: IsGone = never_gone) -> Taken:
    """Hand out messages to the owner of a mailbox. Wait up to `taking.wait_s` seconds for the first one.

    The result is empty if the time has passed, or if the client has disconnected. Errors of `is_gone` are
    raised. A repeated request gets the messages that it got before; of a lease, only those that are still
    leased.

    Args:
        hub: The hub.
        taking: The request.
        is_gone: Tells whether the client has disconnected, which ends a wait. Nothing is taken for good for
            such a client. By default, none does.

    Raises:
        ApiError: 409 if a request with this UUID asked for something else, 503 if the gateway stops, or has no
            room for the answer.
        BackboneUnreachable: Kafka is unreachable, or the record was not settled in time. The same request may
            be made again.
    """
    deadline = time.monotonic() + taking.wait_s
    hub.appender.check()
    is_fresh = taking.is_repeatable and len(taking.mailboxes) > 1
    if is_fresh:
        # The earlier request may have taken messages from another mailbox than this one would now.
        await _catch_up(hub)
    attempt, has_room = 0, False
    with hub.mailbox_waits.waiting(taking.mailboxes, is_taker=True, request=taking.request) as wait:
        while True:
            wait.clear()
            if (earlier := earlier_taking(hub, taking)) is not None:
                await _reserve(hub, taking, earlier[0])
                return (await _ask(hub, taking, *earlier))[0]
            now_us = hub.log_clock.now_us()
            mailbox = next((one for one in taking.mailboxes if hub.mailboxes.ready(one, now_us)), None)
            if mailbox is not None:
                if not has_room:
                    await _reserve(hub, taking, mailbox)
                    has_room = True
                # Also a client that left before this gateway, which was stopped, read its request.
                if taking.lease_s is None and await is_gone():
                    return Taken()
                # If the same request was made before, the log gives the messages that it gave then.
                taken, is_lost = await _ask(hub, taking, mailbox, taking.request_id(attempt))
                attempt += 1
                if not is_lost or attempt == taking.asks_most:
                    return taken
                continue
            left_s = deadline - time.monotonic()
            if left_s > 0:
                if has_room:
                    hub.answer_memory.release()
                    has_room = False
                is_woken = await wait.wait(left_s)
                is_fresh = False
                if await is_gone():
                    return Taken()
                if hub.stopping.is_set():
                    raise unavailable("the gateway stops; ask another one")
                if is_woken:
                    continue
            elif is_fresh:
                return Taken()
            if not is_fresh:
                # Another gateway may have acknowledged a message or served the same request, and this one has
                # not settled that yet. Each wakes the wait when it is settled, so most waits end earlier.
                await _catch_up(hub)
                is_fresh = True


async def _reserve(hub: Hub, taking: Taking, mailbox: Mailbox) -> None:
    await reserve_answer(hub, taking.origin["principal"], mailbox, taking.limit, taking.bytes_most)


async def _catch_up(hub: Hub) -> None:
    hub.appender.check()
    await hub.fresh.catch_up()


def earlier_taking(hub: Hub, taking: Taking) -> tuple[Mailbox, str] | None:
    """Return the mailbox from which this request got messages when it was made before, and the record's id."""
    return None if taking.request is None else hub.mailboxes.earlier(taking.mailboxes, taking.request)


async def _ask(hub: Hub, taking: Taking, mailbox: Mailbox, request_id: str) -> tuple[Taken, bool]:
    """Ask the log for messages. Return those that it gave, and whether the record got none at all.

    That is so if all went to other consumers, now or when the same record was appended before.
    """
    await hub.appender.settle_accepted(taking_record(hub, taking, mailbox, request_id))
    return taken_by(hub, taking, mailbox, request_id)


def taking_record(hub: Hub, taking: Taking, mailbox: Mailbox, request_id: str) -> OutgoingRecord:
    """Return the record that asks the log for messages of a mailbox."""
    realm, recipient = mailbox
    if taking.lease_s is None:
        body: WireBody = MailboxClaim(
            realm=realm,
            to=recipient,
            request_id=request_id,
            limit=taking.limit,
            bytes_most=taking.bytes_most,
        )
    else:
        body = MailboxLease(
            realm=realm,
            to=recipient,
            request_id=request_id,
            limit=taking.limit,
            bytes_most=taking.bytes_most,
            lease_ms=taking.lease_s * 1000,
            attempts_most=taking.attempts_most or hub.settings.gateway.max_attempts,
        )
    return body.record(**taking.origin)


def taken_by(hub: Hub, taking: Taking, mailbox: Mailbox, request_id: str) -> tuple[Taken, bool]:
    """Return the messages that a settled record got, and whether it got none at all."""
    handed = hub.mailboxes.handed(mailbox, request_id)
    found = (hub.live_view.get(MessageRow, f"{'/'.join(mailbox)}/{message_id}") for message_id in handed)
    rows = [row for row in found if row is not None and row.request_id == request_id]
    if taking.lease_s is not None:
        rows = [row for row in rows if row.status == LEASED]
    if not rows:
        return Taken(), not handed
    rows.sort(key=lambda row: (_PLACE[row.priority], row.posted_at, row.message_id))
    return Taken(rows, request_id), False


def taken_as_json(hub: Hub, taking: Taking, taken: Taken) -> dict[str, Any]:
    """Return the messages that a request got, as `DrainedAnswer` describes them."""
    now_us = hub.log_clock.now_us()
    answer = {
        # All of them: the log has handed them out within the limit of bytes.
        "messages": encoded_within((message_as_json(hub, row) for row in taken.rows), sys.maxsize),
        "left": sum(hub.mailboxes.ready(one, now_us) for one in taking.mailboxes),
    }
    if taking.lease_s is not None and taken.request_id is not None:
        answer["lease_id"] = taken.request_id
    return answer


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


def lease_ends(wanted: Sequence[str], known: Sequence[str], settled: Sequence[SettledRecord]) -> LeaseEnds:
    """Return the result of records about leased messages.

    Args:
        wanted: The ids of the messages that were asked for, each once.
        known: The ids among them that have a record.
        settled: Their records.
    """
    found = dict(zip(known, settled, strict=True))
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


def places_of(hub: Hub, mailboxes: Sequence[Mailbox], message_ids: Sequence[str]) -> dict[str, Mailbox]:
    """Return for each known message the mailbox among these that has it."""
    return {
        one: mailbox
        for one in message_ids
        for mailbox in mailboxes
        if hub.live_view.get(MessageRow, "/".join((*mailbox, one))) is not None
    }


async def wait_reply(
    hub: Hub,
    wait: MailboxWait,
    message_id: str,
    recipient: str,
    timeout_s: float,
    origin: Origin,
    is_gone: IsGone = never_gone,
    lease_s: int | None = None,
) -> MessageRow | None:
    """Take the first reply to a message out of the asker's mailbox, and return its row.

    The result is None if no reply came in time, or the client has disconnected. A reply that comes later is in
    the mailbox, and so is one from a sender that was not asked.

    Args:
        hub: The hub.
        wait: The wait for messages of the asker's mailboxes. It began before the message was sent.
        message_id: The id of the message that was sent.
        recipient: The recipient of that message. The reply of a listener, or of the hub, may have any sender,
            because others answer for them. Any other recipient answers itself.
        timeout_s: How many seconds to wait.
        origin: The door and the principal of the asker.
        is_gone: Tells a client that has disconnected during the wait. By default, none does.
        lease_s: The duration of a lease in seconds. None takes the reply for good.

    Raises:
        ApiError: 503 if the gateway stops.
        BackboneUnreachable: Kafka is unreachable, or the claim was not settled in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        wait.clear()
        for mailbox in wait.mailboxes:
            if (row := await _taken(hub, mailbox, message_id, recipient, origin, lease_s)) is not None:
                return row
        hub.answer_memory.release()
        left = deadline - time.monotonic()
        if left <= 0 or not await wait.wait(left) or await is_gone():
            return None
        if hub.stopping.is_set():
            raise unavailable("the gateway stops; ask another one, with the same idempotency key")


async def _taken(
    hub: Hub, mailbox: Mailbox, message_id: str, recipient: str, origin: Origin, lease_s: int | None
) -> MessageRow | None:
    """Return the reply that this request has taken before, or takes now; None without one that nobody holds."""
    place: dict[str, Any] = {"realm": mailbox[0], "to": mailbox[1]}
    for reply_id in hub.mailboxes.replies(mailbox, message_id):
        key, claim_id = "/".join((*mailbox, reply_id)), str(uuid.uuid5(uuid.UUID(message_id), reply_id))
        row = hub.live_view.get(MessageRow, key)
        if row is None or not _may_answer(hub, recipient, row):
            continue
        if row.status == UNREAD:
            await reserve_answer(hub, origin["principal"], mailbox, 1, 0)
            if lease_s is None:
                body: WireBody = MailboxClaim(
                    **place, request_id=claim_id, limit=LIMIT_MOST, message_ids=[reply_id], if_unread=True
                )
            else:
                body = MailboxLease(
                    **place,
                    request_id=_lease_id(claim_id, row.attempts),
                    lease_ms=lease_s * 1000,
                    message_ids=[reply_id],
                    attempts_most=hub.settings.gateway.max_attempts,
                )
            await hub.appender.settle_accepted(body.record(**origin))
            row = hub.live_view.get(MessageRow, key)
        if row is None or row.status not in (CLAIMED, LEASED):
            continue
        if row.request_id in (claim_id, _lease_id(claim_id, row.attempts - 1)):
            return row
    return None


def _lease_id(claim_id: str, attempts: int) -> str:
    """Return the id of the lease of a reply that was handed out so often before.

    A reply that was given back is leased again, so each lease has an id of its own.
    """
    return str(uuid.uuid5(uuid.UUID(claim_id), str(attempts)))


def _may_answer(hub: Hub, recipient: str, row: MessageRow) -> bool:
    """Return whether a message can be the reply to a question that this recipient got."""
    is_itself = recipient in (row.sender, address_of_sender(hub, row))
    return is_itself or recipient == HUB or hub.listeners.row(recipient) is not None
