"""Records of one mailbox at any time, and what the fold says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.fold import settle
from schemas.streams.mailboxes.mailbox_bodies import (
    MailboxClaim,
    MailboxClearing,
    MailboxLease,
    MessageAck,
    MessageDue,
    MessageExpiry,
    MessageNack,
    MessageReading,
    MessageReclaim,
)
from schemas.streams.mailboxes.message import Message, MessageRow
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import WireBody
from tests.schemas.job_records import KEYRING, START_US, said
from tests.schemas.stream_records import as_read, message

S_US: Final = 1_000_000
LEASE_US: Final = 30 * S_US
AT: Final = {"to": "bo"}
PUMP: Final[dict[str, Any]] = {"door": "xml", "principal": "bo"}
HUB: Final[dict[str, Any]] = {"door": "http", "principal": "bo"}


def _builder(body: type[WireBody], *named: str) -> Callable[..., OutgoingRecord]:
    """Return a builder of records with this body, which takes these fields by position."""

    def build(
        *values: str, by: Mapping[str, Any] = PUMP, ce_id: str | None = None, **fields: Any
    ) -> OutgoingRecord:
        return body(**AT, **dict(zip(named, values, strict=True)), **fields).record(ce_id=ce_id, **by)

    return build


a_claim: Final = _builder(MailboxClaim, "request_id")
a_lease: Final = _builder(MailboxLease, "request_id")
a_clearing: Final = _builder(MailboxClearing, "request_id")
an_ack: Final = _builder(MessageAck, "message_id", "request_id")
a_nack: Final = _builder(MessageNack, "message_id", "request_id")
a_reclaim: Final = _builder(MessageReclaim, "message_id", "request_id")
a_reading: Final = _builder(MessageReading, "message_id")
an_expiry: Final = _builder(MessageExpiry, "message_id")
a_due: Final = _builder(MessageDue, "message_id")


def at(offset_us: int, made: OutgoingRecord, entries: Entries) -> Settled:
    """Settle a record that is logged `offset_us` after the start."""
    return settle(
        msgspec.structs.replace(as_read(made), logged_at_us=START_US + offset_us), entries, KEYRING, Entries()
    )


def post_at(offset_us: int, entries: Entries, message_id: str = "m1", **changed: Any) -> Settled:
    """Settle a message that is posted `offset_us` after the start."""
    posted = Message.model_validate(message(message_id, **changed))
    return at(offset_us, posted.record(door="http", principal="ann"), entries)


def mailbox_of(*message_ids: str, **changed: Any) -> Entries:
    """The entries of a mailbox with these messages, posted at the start."""
    entries = Entries()
    for message_id in message_ids:
        assert said(post_at(0, entries, message_id, **changed)) == ("accepted", None)
    return entries


def rows_of(settled: Settled) -> list[MessageRow]:
    """The rows of the mailbox that have changed."""
    return [change.row for change in settled.changes if isinstance(change.row, MessageRow)]


def row_of(settled: Settled) -> MessageRow:
    """The one row of the mailbox that has changed."""
    (row,) = rows_of(settled)
    return row


def statuses(settled: Settled) -> dict[str, str]:
    """Message id to status after the record, in the order of the changes."""
    return {row.message_id: row.status for row in rows_of(settled)}


def refused(settled: Settled) -> tuple[str | None, str | None]:
    """Reason, and status of the message."""
    assert (settled.verdict, settled.changes) == ("rejected", ())
    return settled.reason, settled.status_after


def leased(limit: int = 1, *message_ids: str) -> Entries:
    """A mailbox of m1 (or of these), of which the pump has leased `limit` at the start by the request l1."""
    entries = mailbox_of(*(message_ids or ("m1",)))
    assert (
        len(rows_of(at(0, MailboxLease(**AT, request_id="l1", limit=limit).record(**PUMP), entries))) == limit
    )
    return entries
