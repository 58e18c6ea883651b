"""The fold of the stream `mailbox/<realm>/<agent>`: posting, leases, ack, nack, reading and expiry (HH-06).

The module `message` declares the life cycle of a message, `mailbox_entries` the state of the stream.

`status_after` is the status of the message if the record is about one message whose status is known. It is
`None` if the record is about the whole mailbox.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold.settled import Change, Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.streams.mailboxes.mailbox_bodies import (
    CLAIM_LIMIT,
    LEASE_LIMIT,
    LEASE_MS,
    LIMIT_MOST,
    MAILBOX_CLEARED,
    MAILBOX_CLOSED,
    MAILBOX_LIMITED,
    MAILBOX_MODELS,
    MAILBOX_OPENED,
    MESSAGE_ACKED,
    MESSAGE_CLAIMED,
    MESSAGE_DUE,
    MESSAGE_EXPIRED,
    MESSAGE_EXTENDED,
    MESSAGE_LEASED,
    MESSAGE_NACKED,
    MESSAGE_READ,
    MESSAGE_RECLAIMED,
    MESSAGES_HANDLED,
    MailboxLimitRow,
    OwnLimits,
)
from schemas.streams.mailboxes.mailbox_entries import (
    ENTRY_VERSION,
    OF_MAILBOX,
    OF_MESSAGE,
    Leases,
    MailboxEntries,
)
from schemas.streams.mailboxes.mailbox_postings import CLOSED, settle_posting
from schemas.streams.mailboxes.message import (
    CLAIMED,
    CLEARED,
    DEAD,
    DEFAULT_REALM,
    DELAYED,
    EXPIRED,
    LEASED,
    MESSAGE_POSTED,
    MESSAGE_TRANSITIONS,
    READ,
    UNREAD,
    MessageBodyRow,
    MessageRow,
)
from schemas.streams.mailboxes.pending_message import PendingMessage, is_of_a_wrong_clock
from schemas.streams.thread.threads import ThreadRow
from trunkline_agent.wire.ids import MAILBOX
from trunkline_agent.wire.verdicts import (
    AFTER_TERMINAL,
    ILLEGAL_TRANSITION,
    SEQ_CONFLICT,
    UNKNOWN_STREAM,
)

# A message that was handed out this many times without an ack is dead, unless its lease has another limit.
ATTEMPTS_MOST: Final = 3
LEASE_RAN_OUT: Final = "the lease ran out"
_OF_MAILBOX_TYPES: Final = frozenset(
    {MESSAGE_CLAIMED, MESSAGE_LEASED, MAILBOX_CLEARED, MAILBOX_CLOSED, MAILBOX_OPENED, MAILBOX_LIMITED}
)
# The final status to which each of these records leads.
_FINAL_BY_TYPE: Final = {MESSAGE_ACKED: CLAIMED, MESSAGE_READ: READ, MESSAGE_EXPIRED: EXPIRED}


def settle_mailbox(given: FoldInput) -> Outcome:
    """Settle a record of a mailbox: update the stream state, return verdict and changed rows.

    The record posts a message, hands messages out, ends a lease or a message, or concerns the whole mailbox.
    `schemas.streams.fold.settle` calls this function with a checked body. The changes of the stream state,
    `given.entries`, count only if the record is accepted.
    """
    mailbox = MailboxEntries(given.name, given.entries, given.now_us)
    if given.type == MESSAGE_POSTED:
        return settle_posting(given, mailbox)
    if given.type in _OF_MAILBOX_TYPES:
        return _settle_request(given, mailbox)
    if given.type == MESSAGES_HANDLED:
        return _settle_handled(given, mailbox)
    return _settle_message(given, mailbox)


def _mailbox_of(body: dict[str, Any]) -> str | None:
    """Return the mailbox that a body names, `None` if its fields are not text."""
    realm, agent = body.get("realm", DEFAULT_REALM), body.get("to")
    return f"{realm}/{agent}" if type(realm) is str and type(agent) is str else None


def _settle_request(given: FoldInput, mailbox: MailboxEntries) -> Outcome:
    """Return the outcome of a record about the whole mailbox. It is accepted even if there is no message."""
    requests, asked = mailbox.requests(OF_MAILBOX), _asked(given)
    repeated = requests.repeated(asked, mailbox.older_requests(OF_MAILBOX), None)
    if repeated is not None:
        return repeated
    leases = mailbox.leases()
    changes: list[Change] = []
    if given.type in (MAILBOX_CLOSED, MAILBOX_OPENED):
        mailbox.put_closed(is_closed=given.type == MAILBOX_CLOSED)
    elif given.type == MAILBOX_LIMITED:
        changes = [_limit(given, mailbox)]
    elif given.type == MAILBOX_CLEARED:
        cleared = [*mailbox.in_order(), *mailbox.all_delayed()]
        changes = [_end(message, CLEARED, mailbox, leases) for message in cleared]
    elif given.type == MESSAGE_LEASED and mailbox.is_closed and not given.body.get("from_closed"):
        return rejected(ILLEGAL_TRANSITION, CLOSED)
    elif _is_fact(given) and not any(map(mailbox.known, given.body["message_ids"])):
        return rejected(UNKNOWN_STREAM, "no message with one of these ids in the last seven days")
    else:
        changes = _hand_out(given, mailbox, leases)
    mailbox.put_leases(leases)
    requests.add(asked, mailbox.older_requests(OF_MAILBOX))
    mailbox.put_requests(OF_MAILBOX, requests)
    return accepted(None, tuple(changes))


def _asked(given: FoldInput) -> FoldInput:
    """Return a record as its request asked for it: without the bound in bytes, which the door adds.

    A request may be repeated at another door, or after a change of the setting.
    """
    if given.type not in (MESSAGE_CLAIMED, MESSAGE_LEASED) or "bytes_most" not in given.body:
        return given
    body = {name: value for name, value in given.body.items() if name != "bytes_most"}
    return msgspec.structs.replace(given, body=body)


def _limit(given: FoldInput, mailbox: MailboxEntries) -> Change:
    """Set the limits of the mailbox's own."""
    limits = OwnLimits(ENTRY_VERSION, given.body.get("pending_most"), given.body.get("bytes_most"))
    mailbox.put_limits(limits)
    return changed(
        MailboxLimitRow(
            realm=mailbox.realm,
            recipient=mailbox.recipient,
            pending_most=limits.pending_most,
            bytes_most=limits.bytes_most,
            limited_by=given.sender,
            limited_at=given.now_us,
        )
    )


def _is_fact(given: FoldInput) -> bool:
    """Return whether the record is a claim of named messages, which the door has already handed out."""
    is_named = given.body.get("message_ids") is not None
    return given.type == MESSAGE_CLAIMED and is_named and not given.body.get("if_unread")


def _hand_out(given: FoldInput, mailbox: MailboxEntries, leases: Leases) -> list[Change]:
    """Hand out up to `limit` messages. End the expired and dead messages that are found on the way."""
    now_us = mailbox.now_us
    until = None
    left = given.body.get("limit", CLAIM_LIMIT)
    lately: list[int] | None = None
    if given.type == MESSAGE_LEASED:
        until = now_us + given.body.get("lease_ms", LEASE_MS) * 1000
        left = min(given.body.get("limit", LEASE_LIMIT), given.body.get("held_most", LIMIT_MOST) - leases.held)
        if given.body.get("per_minute") is not None:
            lately = mailbox.handed_lately()
            left = min(left, given.body["per_minute"] - len(lately))
    changes = []
    named, room = given.body.get("message_ids"), given.body.get("bytes_most")
    is_first = True
    for message in mailbox.in_order() if named is None else mailbox.of_these(named):
        if left <= 0:
            break
        reason = message.last_reason
        if not _is_fact(given):
            if LEASED not in MESSAGE_TRANSITIONS[message.standing(now_us)]:
                continue
            # No record has taken the expired lease back yet.
            reason = LEASE_RAN_OUT if message.status == LEASED else reason
            if message.is_over(now_us) or _is_worn_out(message, given.body.get("attempts_most")):
                status = EXPIRED if message.is_over(now_us) else DEAD
                message.last_reason = reason
                changes.append(_end(message, status, mailbox, leases))
                continue
        if room is not None:
            room -= message.answer_bytes
            if room < 0 and not is_first:
                # A message that is not written must not change, because later records of a run see it.
                break
        is_first, message.last_reason = False, reason
        left -= 1
        message.attempts += 1
        message.handed_to = given.sender
        message.handed_at = now_us
        message.request_id = given.body["request_id"]
        if until is None:
            changes.append(_end(message, CLAIMED, mailbox, leases))
            continue
        message.status, message.lease_until = LEASED, until
        message.attempts_most = given.body.get("attempts_most")
        leases.begin(until)
        if lately is not None:
            lately.append(now_us)
        mailbox.put(message)
        changes.append(mailbox.change(message))
    if lately:
        mailbox.put_handed(lately)
    return changes


def _settle_message(given: FoldInput, mailbox: MailboxEntries) -> Outcome:
    """Return the outcome of a record about one message that was posted before."""
    requests = mailbox.requests(OF_MESSAGE)
    seen = requests.seen(given, mailbox.older_requests(OF_MESSAGE))
    message = mailbox.pending(given.body["message_id"]) or mailbox.delayed(given.body["message_id"])
    if message is None:
        if seen == "same":
            return duplicate(_FINAL_BY_TYPE.get(given.type))
        if mailbox.known(given.body["message_id"]) is None:
            return rejected(UNKNOWN_STREAM, "no message with this id in the last seven days")
    status = None if message is None else message.status
    if seen == "other":
        return rejected(SEQ_CONFLICT, "this id was used with other content", status)
    if message is None:
        return rejected(AFTER_TERMINAL, "the message has reached a final status")
    if seen == "same" and given.type == MESSAGE_EXTENDED:
        return duplicate(status)
    refusal = _refusal(given.type, given.body.get("request_id"), given.sender, message, mailbox.now_us)
    if refusal is not None:
        # A repeated request has already had its effect, but a message id may be posted again after a week.
        return duplicate(status) if seen == "same" else rejected(ILLEGAL_TRANSITION, refusal, status)
    leases = mailbox.leases()
    status, change = _step(given, message, mailbox, leases)
    mailbox.put_leases(leases)
    requests.add(given, mailbox.older_requests(OF_MESSAGE))
    mailbox.put_requests(OF_MESSAGE, requests)
    return accepted(status, (change,))


def _settle_handled(given: FoldInput, mailbox: MailboxEntries) -> Outcome:
    """Return the outcome of a record that acknowledges several messages: all of them, or none."""
    requests = mailbox.requests(OF_MESSAGE)
    repeated = requests.repeated(given, mailbox.older_requests(OF_MESSAGE), CLAIMED)
    if repeated is not None:
        return repeated
    messages = []
    for one in given.body["messages"]:
        message = mailbox.pending(one["message_id"])
        if message is None:
            return rejected(ILLEGAL_TRANSITION, "one of the messages is not pending")
        refusal = _refusal(MESSAGE_ACKED, one["request_id"], given.sender, message, mailbox.now_us)
        if refusal is not None:
            return rejected(ILLEGAL_TRANSITION, refusal, message.status)
        messages.append(message)
    leases = mailbox.leases()
    changes = tuple([_end(message, CLAIMED, mailbox, leases) for message in messages])
    mailbox.put_leases(leases)
    requests.add(given, mailbox.older_requests(OF_MESSAGE))
    mailbox.put_requests(OF_MESSAGE, requests)
    return accepted(CLAIMED, changes)


def _is_worn_out(message: PendingMessage, attempts_most: int | None = None) -> bool:
    """Return whether a message that nobody holds was handed out too often to be handed out again.

    `attempts_most` is the limit of the lease that is to begin. `None` means that of the newest lease.
    """
    return message.attempts >= (attempts_most or message.attempts_most or ATTEMPTS_MOST)


def _step(
    given: FoldInput, message: PendingMessage, mailbox: MailboxEntries, leases: Leases
) -> tuple[str, Change]:
    """Carry out an allowed record about one message. Return the status that it has now, and its change."""
    final = _FINAL_BY_TYPE.get(given.type)
    if final is not None:
        return final, _end(message, final, mailbox, leases)
    if given.type == MESSAGE_DUE:
        mailbox.deliver(message)
        return UNREAD, mailbox.change(message)
    leases.end(message)
    if given.type == MESSAGE_EXTENDED:
        message.lease_until = mailbox.now_us + given.body["lease_ms"] * 1000
        leases.begin(message.lease_until)
        mailbox.put(message)
        return LEASED, mailbox.change(message)
    message.status, message.lease_until = UNREAD, None
    if given.body.get("is_no_attempt"):
        message.attempts -= 1
    message.last_reason = given.body.get("reason") or (
        LEASE_RAN_OUT if given.type == MESSAGE_RECLAIMED else None
    )
    if _is_worn_out(message):
        return DEAD, _end(message, DEAD, mailbox, leases)
    # After a nack the holder can no longer ack. After an expired lease it still can, until the next lease.
    if given.type == MESSAGE_NACKED:
        message.request_id = None
    mailbox.put(message)
    return UNREAD, mailbox.change(message)


def _refusal(
    kind: str, request_id: str | None, sender: str, message: PendingMessage, now_us: int
) -> str | None:
    """Return why a record of type `kind` by `sender` does not fit the message's state, or `None` if it does."""
    if kind == MESSAGE_DUE:
        return _refusal_of_delivery(message, now_us)
    if message.status == DELAYED and kind != MESSAGE_EXPIRED:
        return "the message is delayed"
    if kind in (MESSAGE_READ, MESSAGE_EXPIRED):
        if _FINAL_BY_TYPE[kind] not in MESSAGE_TRANSITIONS[message.standing(now_us)]:
            return "the message is leased"
        is_early = kind == MESSAGE_EXPIRED and not message.is_over(now_us)
        return "the message has not expired" if is_early else None
    if message.request_id != request_id:
        return "the message is not leased by this request"
    if kind == MESSAGE_RECLAIMED:
        if message.standing(now_us) == LEASED:
            return "the lease has not run out"
    elif message.handed_to != sender:
        return "the message is leased by somebody else"
    elif kind == MESSAGE_EXTENDED:
        return None if message.standing(now_us) == LEASED else "the lease has run out"
    if (_FINAL_BY_TYPE.get(kind) or UNREAD) not in MESSAGE_TRANSITIONS[message.status]:
        return "the message is not leased"
    return None


def _refusal_of_delivery(message: PendingMessage, now_us: int) -> str | None:
    """Return why a message cannot become unread by `message.due`, or `None` if it can."""
    if message.status != DELAYED:
        return "the message has been delivered"
    if message.is_over(now_us):
        return "the message has expired"
    if is_of_a_wrong_clock(message.posted_at, now_us):
        return None
    is_early = message.deliver_at is not None and message.deliver_at > now_us
    return "the time of the delivery has not come" if is_early else None


def _end(message: PendingMessage, status: str, mailbox: MailboxEntries, leases: Leases) -> Change:
    """Bring the message to a final status."""
    leases.end(message)
    mailbox.remove(message)
    return mailbox.change(message, status)


MAILBOX_KIND: Final = StreamKind(
    name=MAILBOX,
    models=MAILBOX_MODELS,
    settle=settle_mailbox,
    row_of_each_stream=(MessageRow,),
    later_rows=(MessageBodyRow, MessageRow, ThreadRow, MailboxLimitRow),
    named_by=_mailbox_of,
)
