"""The timers of messages: a lease ends, a message expires, a delayed one is delivered (DL-21, DL-22)."""

from __future__ import annotations

from typing import Any

from connectors.hub.reactor.derived_records import BY_REACTOR, derived_id
from connectors.hub.reactor.timers import Timers
from schemas.streams.mailboxes.mailbox_bodies import (
    MESSAGE_DUE,
    MESSAGE_EXPIRED,
    MESSAGE_RECLAIMED,
    MessageDue,
    MessageExpiry,
    MessageReclaim,
)
from schemas.streams.mailboxes.message import DELAYED, LEASED, MessageRow
from schemas.streams.mailboxes.pending_message import is_lease_held, is_of_a_wrong_clock
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.ids import MAILBOX, stream_key
from trunkline_agent.wire.moments import has_come, moment_of


class MessageTimers(Timers[MessageRow]):
    """The timers of all messages without a final status. For the arguments see `Timers`.

    A leased message becomes unread when its lease ends, or dead after its last attempt. It cannot expire before
    that. An unread or delayed message expires at `expires_at`. A delayed one becomes unread at `deliver_at`.
    """

    thread_name = "message-timers"
    row_type = MessageRow
    follows = (MessageRow,)

    def stream_of(self, row: MessageRow) -> str:
        """Return the stream of the message's mailbox."""
        return stream_key(MAILBOX, f"{row.realm}/{row.recipient}")

    def moment_of(self, row: MessageRow) -> int | None:
        """Return the end of the lease, the delivery or the expiry, in microseconds; None for a final status."""
        if row.ended_at is not None:
            return None
        now_us = self._log_clock.now_us()
        if row.status == LEASED and row.lease_until is not None:
            is_wrong = row.lease_until > now_us and not is_lease_held(row.lease_until, now_us)
            return 0 if is_wrong else row.lease_until
        if row.status == DELAYED and is_of_a_wrong_clock(row.posted_at, now_us):
            return 0
        expiry = None if row.expires_at is None else moment_of(row.expires_at)
        delivery = row.deliver_at if row.status == DELAYED else None
        return min((at for at in (expiry, delivery) if at is not None), default=None)

    def record_of(self, row: MessageRow, now_us: int) -> OutgoingRecord:
        """Return the record that takes the message back, delivers it or ends it as expired."""
        at: dict[str, Any] = {"realm": row.realm, "to": row.recipient, "message_id": row.message_id}
        if row.status == LEASED:
            lease = str(row.request_id)
            ce_id = derived_id(lease, f"{MESSAGE_RECLAIMED}/{row.key}")
            return MessageReclaim(**at, request_id=lease).record(ce_id=ce_id, **BY_REACTOR)
        # After a week another message may have the same id.
        cause = f"{row.key}/{row.posted_at}"
        if row.expires_at is not None and has_come(row.expires_at, now_us):
            return MessageExpiry(**at).record(ce_id=derived_id(cause, MESSAGE_EXPIRED), **BY_REACTOR)
        return MessageDue(**at).record(ce_id=derived_id(cause, MESSAGE_DUE), **BY_REACTOR)
