"""The fold of `mailbox/<realm>/<agent>` (HH-06): posting, delivery, ack, nack, reading, expiry and clearing.

`schemas.wire.message` draws the life cycle; `schemas.streams.mailboxes.mailbox_entries` defines the state.

`status_after` is the message's for a record about one message, where its status is known, and None for a
record about the whole mailbox.
"""

from __future__ import annotations

from typing import Any, Final

from schemas.fold.entries import Entries
from schemas.fold.request_memory import content_digest
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.view_rows import MESSAGE_BODIES, MessageBodyRow
from schemas.streams.mailboxes.mailbox_entries import (
    ENTRY_VERSION,
    OF_MAILBOX,
    OF_MESSAGE,
    Leases,
    MailboxEntries,
    PendingMessage,
)
from schemas.streams.mailboxes.mailbox_requests import CLAIM_LIMIT, LEASE_LIMIT, LEASE_MS, LIMIT_MOST
from schemas.wire.message import CLAIMED, CLEARED, DEAD, EXPIRED, LEASED, READ, UNREAD
from schemas.wire.record import (
    MAILBOX_CLEARED,
    MAILBOX_CLOSED,
    MAILBOX_OPENED,
    MESSAGE_ACKED,
    MESSAGE_CLAIMED,
    MESSAGE_EXPIRED,
    MESSAGE_LEASED,
    MESSAGE_NACKED,
    MESSAGE_POSTED,
    MESSAGE_READ,
    MESSAGE_RECLAIMED,
    Envelope,
    Record,
)
from schemas.wire.verdicts import AFTER_TERMINAL, ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

# A message that was handed out so often and not acknowledged is not handed out again.
ATTEMPTS_MOST: Final = 3
# Why nothing is posted or leased any more.
CLOSED: Final = "the mailbox is closed"
_OF_MAILBOX_TYPES: Final = frozenset(
    {MESSAGE_CLAIMED, MESSAGE_LEASED, MAILBOX_CLEARED, MAILBOX_CLOSED, MAILBOX_OPENED}
)
# What these records lead to, always.
_FINAL_BY_TYPE: Final = {MESSAGE_ACKED: CLAIMED, MESSAGE_READ: READ, MESSAGE_EXPIRED: EXPIRED}


def settle_mailbox(
    record: Record, envelope: Envelope, name: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    """Settle one record of the mailbox's stream whose body passed the checks of its wire model."""
    mailbox = MailboxEntries(name, entries, record.logged_at_us)
    if envelope.type == MESSAGE_POSTED:
        return _settle_posting(body, mailbox)
    if envelope.type in _OF_MAILBOX_TYPES:
        return _settle_request(envelope, body, mailbox)
    return _settle_message(envelope, body, mailbox)


def _settle_posting(body: dict[str, Any], mailbox: MailboxEntries) -> Outcome:
    message_id, digest = body["message_id"], content_digest(body)
    known = mailbox.known(message_id)
    if known is not None:
        pending = mailbox.pending(message_id)
        status = None if pending is None else pending.status
        if known.digest == digest:
            return duplicate(status)
        return rejected(SEQ_CONFLICT, "this message id was posted with other content", status)
    if mailbox.is_closed:
        return rejected(ILLEGAL_TRANSITION, CLOSED)
    message = PendingMessage(
        version=ENTRY_VERSION,
        message_id=message_id,
        priority=body.get("priority", "normal"),
        posted_at=mailbox.next_moment(),
        status=UNREAD,
        sender=body["from"],
        from_verified=body.get("from_verified", False),
        kind=body["kind"],
        from_task=body.get("from_task"),
        in_reply_to=body.get("in_reply_to"),
        thread=body.get("thread"),
        broadcast_id=body.get("broadcast_id"),
        sent_at=body.get("sent_at"),
        expires_at=body.get("expires_at"),
        parent_thread=body.get("parent_thread"),
        root_thread=body.get("root_thread"),
        on_behalf_of=body.get("on_behalf_of"),
    )
    mailbox.add(message, digest)
    row = mailbox.change(message)
    said = MessageBodyRow(
        realm=mailbox.realm,
        recipient=mailbox.recipient,
        message_id=message_id,
        body=body["body"],
        content_type=body.get("content_type", "application/json"),
    )
    return accepted(UNREAD, (Change(MESSAGE_BODIES, row.key, said), row))


def _settle_request(envelope: Envelope, body: dict[str, Any], mailbox: MailboxEntries) -> Outcome:
    """A record about the whole mailbox. It counts also when there is nothing for it to do."""
    requests = mailbox.requests(OF_MAILBOX)
    seen = requests.seen(envelope.ce_id, body)
    if seen == "same":
        return duplicate(None)
    if seen == "other":
        return rejected(SEQ_CONFLICT, "this request id was used with other content")
    leases = mailbox.leases()
    changes: list[Change] = []
    if envelope.type in (MAILBOX_CLOSED, MAILBOX_OPENED):
        mailbox.put_closed(is_closed=envelope.type == MAILBOX_CLOSED)
    elif envelope.type == MAILBOX_CLEARED:
        changes = [_end(message, CLEARED, mailbox, leases) for message in mailbox.in_order()]
    elif leases.ends and leases.door != envelope.door and not _is_fact(envelope, body):
        return rejected(ILLEGAL_TRANSITION, "another door holds leases on this mailbox")
    elif envelope.type == MESSAGE_LEASED and mailbox.is_closed and not body.get("from_closed"):
        return rejected(ILLEGAL_TRANSITION, CLOSED)
    else:
        changes = _hand_out(envelope, body, mailbox, leases)
    mailbox.put_leases(leases)
    requests.add(envelope.ce_id, body)
    mailbox.put_requests(OF_MAILBOX, requests)
    return accepted(None, tuple(changes))


def _is_fact(envelope: Envelope, body: dict[str, Any]) -> bool:
    """A claim that names its messages tells what has happened: a poll has handed them out, in any case."""
    return envelope.type == MESSAGE_CLAIMED and body.get("message_ids") is not None


def _hand_out(
    envelope: Envelope, body: dict[str, Any], mailbox: MailboxEntries, leases: Leases
) -> list[Change]:
    """Hand out up to `limit` messages, and end those on the way that are not to be handed out any more."""
    now_us = mailbox.now_us
    until = None
    left = body.get("limit", CLAIM_LIMIT)
    lately: list[int] | None = None
    if envelope.type == MESSAGE_LEASED:
        until = now_us + body.get("lease_ms", LEASE_MS) * 1000
        left = min(body.get("limit", LEASE_LIMIT), body.get("held_most", LIMIT_MOST) - leases.held)
        if body.get("per_minute") is not None:
            lately = mailbox.handed_lately()
            left = min(left, body["per_minute"] - len(lately))
    changes = []
    named = body.get("message_ids")
    for message in mailbox.in_order() if named is None else mailbox.of_these(named):
        if left <= 0:
            break
        if not _is_fact(envelope, body):
            if message.is_held(now_us):
                continue
            if message.is_over(now_us) or message.attempts >= ATTEMPTS_MOST:
                status = EXPIRED if message.is_over(now_us) else DEAD
                changes.append(_end(message, status, mailbox, leases))
                continue
        left -= 1
        message.attempts += 1
        message.handed_to = f"{envelope.door}/{envelope.principal}"
        message.handed_at = now_us
        message.request_id = body["request_id"]
        if until is None:
            changes.append(_end(message, CLAIMED, mailbox, leases))
            continue
        message.status, message.lease_until = LEASED, until
        leases.begin(envelope.door, until)
        if lately is not None:
            lately.append(now_us)
        mailbox.put(message)
        changes.append(mailbox.change(message))
    if lately:
        mailbox.put_handed(lately)
    return changes


def _settle_message(envelope: Envelope, body: dict[str, Any], mailbox: MailboxEntries) -> Outcome:
    """A record about one message that was posted before."""
    requests = mailbox.requests(OF_MESSAGE)
    seen = requests.seen(envelope.ce_id, body)
    message = mailbox.pending(body["message_id"])
    if message is None:
        if seen == "same":
            return duplicate(_FINAL_BY_TYPE.get(envelope.type))
        if mailbox.known(body["message_id"]) is None:
            return rejected(UNKNOWN_STREAM, "no message with this id in the last seven days")
    status = None if message is None else message.status
    if seen == "other":
        return rejected(SEQ_CONFLICT, "this id was used with other content", status)
    if message is None:
        return rejected(AFTER_TERMINAL, "the message has reached a final status")
    refusal = _refusal(envelope, body, message, mailbox.now_us)
    if refusal is not None:
        # What it asks for was done before. If not, it is a new wish: an id may be posted again after a week.
        return duplicate(status) if seen == "same" else rejected(ILLEGAL_TRANSITION, refusal, status)
    leases = mailbox.leases()
    final = _FINAL_BY_TYPE.get(envelope.type)
    if body.get("is_no_attempt"):
        message.attempts -= 1
    if final is None and message.attempts >= ATTEMPTS_MOST:
        final = DEAD
    if final is not None:
        change = _end(message, final, mailbox, leases)
    else:
        change = _give_back(envelope, message, mailbox, leases)
    mailbox.put_leases(leases)
    requests.add(envelope.ce_id, body)
    mailbox.put_requests(OF_MESSAGE, requests)
    return accepted(final or UNREAD, (change,))


def _refusal(envelope: Envelope, body: dict[str, Any], message: PendingMessage, now_us: int) -> str | None:
    """Why the record cannot be about the message as it stands, or None."""
    kind, is_held = envelope.type, message.is_held(now_us)
    if kind in (MESSAGE_READ, MESSAGE_EXPIRED):
        if is_held:
            return "the message is leased"
        is_early = kind == MESSAGE_EXPIRED and not message.is_over(now_us)
        return "the message has not expired" if is_early else None
    if message.request_id != body["request_id"]:
        return "the message is not leased by this request"
    if kind == MESSAGE_RECLAIMED:
        if is_held:
            return "the lease has not run out"
    elif message.handed_to != f"{envelope.door}/{envelope.principal}":
        return "the message is leased by somebody else"
    if message.status != LEASED and kind in (MESSAGE_NACKED, MESSAGE_RECLAIMED):
        return "the message is not leased"
    return None


def _give_back(envelope: Envelope, message: PendingMessage, mailbox: MailboxEntries, leases: Leases) -> Change:
    """Make the message unread again."""
    leases.end(message)
    message.status, message.lease_until = UNREAD, None
    # Who gave it back cannot acknowledge it any more; who was late with it can, until somebody else gets it.
    if envelope.type == MESSAGE_NACKED:
        message.request_id = None
    mailbox.put(message)
    return mailbox.change(message)


def _end(message: PendingMessage, status: str, mailbox: MailboxEntries, leases: Leases) -> Change:
    """Bring the message to a final status."""
    leases.end(message)
    mailbox.remove(message)
    return mailbox.change(message, status)
