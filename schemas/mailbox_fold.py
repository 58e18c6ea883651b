"""The fold of `mailbox/<realm>/<agent>`: what is posted lies there unread, each message id once.

One entry for each message: `message/<id>`, the digest of its content.
"""

from __future__ import annotations

from typing import Any, Final

from schemas.entries import Entries
from schemas.message import DEFAULT_REALM
from schemas.record import Record
from schemas.request_memory import content_digest
from schemas.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.verdicts import SEQ_CONFLICT
from schemas.view_rows import MAILBOX_VIEW, MessageRow

UNREAD: Final = "unread"


def settle_mailbox(record: Record, mailbox: str, body: dict[str, Any], entries: Entries) -> Outcome:
    """Settle one posted message whose body passed the checks of its wire model."""
    message_id, digest = body["message_id"], content_digest(body)
    known = entries.get(f"message/{message_id}")
    if known is not None:
        if known == digest:
            return duplicate(UNREAD)
        return rejected(SEQ_CONFLICT, "this message id was posted with other content", UNREAD)
    entries.put(f"message/{message_id}", digest)
    row = MessageRow(
        realm=body.get("realm", DEFAULT_REALM),
        recipient=body["to"],
        message_id=message_id,
        status=UNREAD,
        sender=body["from"],
        from_verified=body.get("from_verified", False),
        kind=body["kind"],
        priority=body.get("priority", "normal"),
        body=body["body"],
        content_type=body.get("content_type", "application/json"),
        in_reply_to=body.get("in_reply_to"),
        thread=body.get("thread"),
        broadcast_id=body.get("broadcast_id"),
        sent_at=body.get("sent_at"),
        expires_at=body.get("expires_at"),
        posted_at=record.logged_at_us,
    )
    return accepted(UNREAD, (Change(MAILBOX_VIEW, f"{mailbox}/{message_id}", row),))
