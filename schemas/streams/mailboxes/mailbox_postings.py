"""The posting of a message to a mailbox: the part of the mailbox's fold that settles `message.posted`."""

from __future__ import annotations

from typing import Any, Final

from schemas.fold.memories import content_digest
from schemas.fold.settled import Change, Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput
from schemas.streams.mailboxes.mailbox_entries import ENTRY_VERSION, MailboxEntries
from schemas.streams.mailboxes.message import DELAYED, MESSAGE_BODIES, UNREAD, MessageBodyRow
from schemas.streams.mailboxes.message_text import is_long_body
from schemas.streams.mailboxes.pending_message import PendingMessage
from schemas.streams.thread.threads import ThreadRow
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, MAILBOX_FULL, SEQ_CONFLICT, UNAUTHENTICATED_RECORD

# The explanation of a rejected posting or lease.
CLOSED: Final = "the mailbox is closed"
_FILE_DOOR: Final = "file"
# Only the gateway can know these of a message. The file bridge posts what anybody wrote into a file.
_OF_THE_GATEWAY: Final = (
    "from_verified",
    "from_task",
    "opens_thread",
    "parent_thread",
    "root_thread",
    "on_behalf_of",
    "topic",
    "unlimited",
    "hops",
)
# The optional fields that the message has in the mailbox as they were posted.
_AS_POSTED: Final = (
    *(one.name for one in MESSAGE_FIELDS),
    "from_task",
    "broadcast_id",
    "sent_at",
    "parent_thread",
    "root_thread",
    "on_behalf_of",
    "replay_of",
    "topic",
    "hops",
)
_OF_THE_DOOR: Final = frozenset({"opens_thread", "pending_most", "bytes_most", "unlimited"})


def settle_posting(given: FoldInput, mailbox: MailboxEntries) -> Outcome:
    """Settle a record `message.posted`: add the message to the mailbox's entries, return verdict and rows.

    `mailbox` are the entries of the stream. A message with `deliver_after_ms` is delayed, any other unread.
    """
    body = given.body
    if given.envelope.door == _FILE_DOOR and not _is_of_a_file(body):
        return rejected(UNAUTHENTICATED_RECORD, "the file bridge cannot vouch for the message's origin")
    message_id = body["message_id"]
    digest = content_digest(_content(body))
    known = mailbox.known(message_id)
    if known is not None:
        pending = mailbox.pending(message_id) or mailbox.delayed(message_id)
        status = None if pending is None else pending.status
        if known.digest == digest:
            return duplicate(status)
        return rejected(SEQ_CONFLICT, "this message id was posted with other content", status)
    if mailbox.is_closed:
        return rejected(ILLEGAL_TRANSITION, CLOSED)
    blob = body.get("blob")
    blob_bytes = 0 if blob is None else blob["bytes"]
    body_bytes = len(body["body"].encode()) + blob_bytes
    if why := _full(body, mailbox, body_bytes):
        return rejected(MAILBOX_FULL, why)
    deliver_at = _later(mailbox.now_us, body.get("deliver_after_ms"))
    expiry = _later(mailbox.now_us, body.get("expires_in_ms"))
    message = PendingMessage(
        version=ENTRY_VERSION,
        message_id=message_id,
        priority=body.get("priority", "normal"),
        posted_at=mailbox.next_moment(),
        status=UNREAD if deliver_at is None else DELAYED,
        sender=body["from"],
        from_verified=body.get("from_verified", False),
        kind=body["kind"],
        expires_at=body.get("expires_at") if expiry is None else iso_moment(expiry),
        deliver_at=deliver_at,
        body_bytes=body_bytes,
        blob=None if blob is None else blob["digest"],
        blob_bytes=blob_bytes,
        **{name: body[name] for name in _AS_POSTED if name in body},
    )
    mailbox.add(message, digest)
    row = mailbox.change(message)
    said = MessageBodyRow(
        realm=mailbox.realm,
        recipient=mailbox.recipient,
        message_id=message_id,
        body=body["body"],
        content_type=body.get("content_type", "application/json"),
        blob_bytes=None if blob is None else blob["bytes"],
        blob_type=None if blob is None else blob["content_type"],
    )
    opened = () if body.get("opens_thread") is None else _opened_thread(message, mailbox.recipient)
    return accepted(message.status, (Change(MESSAGE_BODIES, row.key, said), row, *opened))


def _is_of_a_file(body: dict[str, Any]) -> bool:
    """Return whether the file bridge may post this: no mark of the gateway, and no blob but for a long body."""
    blob = body.get("blob")
    return not any(body.get(name) for name in _OF_THE_GATEWAY) and (
        blob is None or is_long_body(body["body"], blob)
    )


def _later(now_us: int, duration_ms: int | None) -> int | None:
    """Return the time `duration_ms` after `now_us`, both in microseconds since 1970 UTC; `None` without one."""
    return None if duration_ms is None else now_us + duration_ms * 1000


def _full(body: dict[str, Any], mailbox: MailboxEntries, body_bytes: int) -> str | None:
    """Return why the mailbox has no room for one more message with this body, or `None` if it has."""
    # The size of a mailbox of an earlier fold version is counted before its first new message.
    own, size = mailbox.own_limits, mailbox.size()
    if body.get("unlimited"):
        return None
    pending_most = body.get("pending_most") if own.pending_most is None else own.pending_most
    if pending_most is not None and size.messages >= pending_most:
        return f"{size.messages} messages wait in the mailbox, and its limit is {pending_most}"
    bytes_most = body.get("bytes_most") if own.bytes_most is None else own.bytes_most
    if bytes_most is not None and size.body_bytes + body_bytes > bytes_most:
        return f"{size.body_bytes} bytes wait in the mailbox, and its limit is {bytes_most}"
    return None


def _content(body: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a message the same. A repeated request may have other marks of its door."""
    if _OF_THE_DOOR.isdisjoint(body):
        return body
    return {name: value for name, value in body.items() if name not in _OF_THE_DOOR}


def _opened_thread(message: PendingMessage, recipient: str) -> tuple[Change, ...]:
    """Return the row of the conversation that a message opens; none if its place in the tree is not known.

    If two gateways mark a message of one conversation at the same moment, the row names the later one. The
    place in the tree is the same in both.
    """
    thread, parent, root = message.thread, message.parent_thread, message.root_thread
    if thread is None or parent is None or root is None:
        return ()
    return (
        changed(
            ThreadRow(
                thread=thread,
                parent_thread=parent,
                root_thread=root,
                opened_by=message.sender,
                seen_by=recipient,
                on_behalf_of=message.on_behalf_of or message.sender,
                kind=message.kind,
                message_id=message.message_id,
                opened_at=message.posted_at,
            )
        ),
    )
