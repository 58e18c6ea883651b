"""Waits for the reply to a message, and takes it out of the asker's mailbox (DL-07).

**Delivers** a reply once: either as the answer of the request that waits, or in the mailbox. A request that is
repeated with the same idempotency key gets the reply again. A leased reply comes again unless it is acked.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox, MailboxWait
from connectors.hub.serving.answers import unavailable
from connectors.hub.serving.identities import Origin
from connectors.operations.messages.deliveries import IsGone, never_gone
from connectors.operations.messages.shown_messages import address_of_sender, reserve_answer
from schemas.streams.mailboxes.mailbox_bodies import LIMIT_MOST, MailboxClaim, MailboxLease
from schemas.streams.mailboxes.message import CLAIMED, LEASED, UNREAD, MessageRow
from schemas.streams.principal.principals import HUB
from schemas.wire.wire_body import WireBody


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
