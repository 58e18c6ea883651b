"""How much waits in each mailbox, and since when."""

from __future__ import annotations

from typing import Any, Final

from connectors.gateway.services.mailboxes import Mailbox, MailboxIndex
from connectors.live.live_view import LiveView
from schemas.fold.view_rows import MAILBOX_VIEW, MessageRow
from schemas.wire.message import MESSAGE_PENDING

# More than these nobody looks through; the sum counts all.
SHOWN: Final = 200


class MailboxDepths:
    """Depth and oldest message of a mailbox. Not thread-safe: for one thread at a time."""

    def __init__(self, live_view: LiveView, index: MailboxIndex) -> None:
        self._live_view = live_view
        self._index = index
        self._oldest: dict[Mailbox, tuple[str, int]] = {}

    def deepest(self) -> dict[str, Any]:
        """The deepest mailboxes, and the sums over all."""
        depths = self._index.depths()
        for gone in self._oldest.keys() - depths.keys():
            del self._oldest[gone]
        chosen = sorted(depths.items(), key=lambda found: (-found[1], found[0]))[:SHOWN]
        return {
            "mailboxes": [self._as_json(mailbox, depth) for mailbox, depth in chosen],
            "messages": sum(depths.values()),
            "total": len(depths),
        }

    def _as_json(self, mailbox: Mailbox, depth: int) -> dict[str, Any]:
        oldest = self._oldest_us(mailbox)
        return {
            "realm": mailbox[0],
            "recipient": mailbox[1],
            "depth": depth,
            "oldest_ms": None if oldest is None else oldest // 1000,
        }

    def _oldest_us(self, mailbox: Mailbox) -> int | None:
        # What comes later is younger: the oldest stays it until it is handed out.
        known = self._oldest.get(mailbox)
        if known is not None and self._posted_at(mailbox, known[0]) == known[1]:
            return known[1]
        waiting = [
            (posted, message_id)
            for message_id in self._index.waiting(mailbox)
            if (posted := self._posted_at(mailbox, message_id)) is not None
        ]
        if not waiting:
            self._oldest.pop(mailbox, None)
            return None
        posted, message_id = min(waiting)
        self._oldest[mailbox] = (message_id, posted)
        return posted

    def _posted_at(self, mailbox: Mailbox, message_id: str) -> int | None:
        row = self._live_view.row(MAILBOX_VIEW, f"{mailbox[0]}/{mailbox[1]}/{message_id}")
        return row.posted_at if isinstance(row, MessageRow) and row.status in MESSAGE_PENDING else None
