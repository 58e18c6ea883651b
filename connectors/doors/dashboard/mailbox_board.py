"""One mailbox as the dashboard shows it (DL-11): its waiting, leased and dead messages, and one message."""

from __future__ import annotations

import heapq
import time
from typing import Any, Final

from connectors.doors.dashboard.shown_rows import milliseconds, shortened
from connectors.hub.live.live_view import LiveView
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.services.mailboxes import MailboxIndex
from schemas.streams.mailboxes.message import (
    DEAD,
    LEASED,
    PRIORITIES,
    UNREAD,
    MessageBodyRow,
    MessageRow,
)
from schemas.streams.principal.principals import OPERATOR

BODY_CHARACTERS: Final = 65_536
WAITING: Final = "waiting"
_PLACE: Final = {priority: place for place, priority in enumerate(PRIORITIES)}


class MailboxBoard:
    """The messages of a mailbox as JSON, made from the live view at each call. Thread-safe.

    The index has every waiting and leased message, and the dead ones among the newest 50,000 final messages.
    """

    def __init__(self, live_view: LiveView, index: MailboxIndex) -> None:
        self._live_view = live_view
        self._index = index

    def counts(self, mailbox: Mailbox) -> dict[str, int]:
        """Return the number of waiting, leased and dead messages of a mailbox, 0 for an unknown one.

        A message whose lease has run out counts as waiting.
        """
        ready = self._index.ready(mailbox, time.time_ns() // 1000)
        return {
            WAITING: ready,
            LEASED: max(0, self._index.depth(mailbox) - ready),
            DEAD: self._index.dead_count(mailbox),
        }

    def contents(self, mailbox: Mailbox, limit: int) -> dict[str, Any]:
        """Return three lists of a mailbox's messages as JSON, each with its whole `count` and `messages`.

        `waiting` is in the order in which the messages are handed out. In `leased`, the lease that ends first
        is the first, and in `dead` the message that died last. The lists are empty for an unknown mailbox.

        Args:
            mailbox: Realm and recipient.
            limit: The largest number of messages in each list, at least 1.
        """
        now_us = time.time_ns() // 1000
        rows = [self._row(mailbox, message_id) for message_id in self._index.waiting(mailbox)]
        pending = [row for row in rows if row is not None]
        waiting = [row for row in pending if _state(row, now_us) == WAITING]
        leased = [row for row in pending if _state(row, now_us) == LEASED]
        dead = self._index.dead_of(mailbox)
        gone = [row for one in dead[:limit] if (row := self._row(mailbox, one)) is not None]
        return {
            WAITING: self._listed(heapq.nsmallest(limit, waiting, key=_turn), len(waiting), now_us),
            LEASED: self._listed(heapq.nsmallest(limit, leased, key=_end_of_lease), len(leased), now_us),
            DEAD: self._listed(gone, len(dead), now_us),
        }

    def message(self, mailbox: Mailbox, message_id: str, role: str) -> dict[str, Any] | None:
        """Return one message as JSON with its body, or None if the live view does not have it.

        As with records, only the operator may see the body: for any other role, `body` is None. A body of more
        than 65,536 characters is cut, and then `body_cut` is true.
        """
        row = self._row(mailbox, message_id)
        if row is None:
            return None
        body = self._live_view.get(MessageBodyRow, row.key) if role == OPERATOR else None
        return {
            **self._as_json(row, time.time_ns() // 1000),
            "realm": row.realm,
            "recipient": row.recipient,
            "thread": row.thread,
            "expires_at": row.expires_at,
            "body": None if body is None else body.body[:BODY_CHARACTERS],
            "body_cut": body is not None and len(body.body) > BODY_CHARACTERS,
            "content_type": None if body is None else body.content_type,
        }

    def _row(self, mailbox: Mailbox, message_id: str) -> MessageRow | None:
        return self._live_view.get(MessageRow, "/".join((*mailbox, message_id)))

    def _listed(self, rows: list[MessageRow], count: int, now_us: int) -> dict[str, Any]:
        return {"count": count, "messages": [self._as_json(row, now_us) for row in rows]}

    def _as_json(self, row: MessageRow, now_us: int) -> dict[str, Any]:
        replays = self._index.replays((row.realm, row.recipient), row.message_id) if row.status == DEAD else []
        return {
            "message_id": row.message_id,
            "state": _state(row, now_us),
            "sender": row.sender,
            "sender_verified": row.from_verified,
            "kind": row.kind,
            "priority": row.priority,
            "posted_ms": milliseconds(row.posted_at),
            "attempts": row.attempts,
            "handed_to": row.handed_to,
            "handed_ms": milliseconds(row.handed_at),
            "lease_until_ms": milliseconds(row.lease_until),
            "ended_ms": milliseconds(row.ended_at),
            "last_reason": shortened(row.last_reason),
            "in_reply_to": row.in_reply_to,
            "replay_of": row.replay_of,
            "replayed_as": replays[-1] if replays else None,
        }


def _state(row: MessageRow, now_us: int) -> str:
    """Return `waiting`, `leased`, or the final status of a message. An expired lease counts as none."""
    if row.status == UNREAD:
        return WAITING
    if row.status == LEASED:
        return LEASED if (row.lease_until or 0) > now_us else WAITING
    return row.status


def _turn(row: MessageRow) -> tuple[int, int, str]:
    return _PLACE[row.priority], row.posted_at, row.message_id


def _end_of_lease(row: MessageRow) -> tuple[int, str]:
    return row.lease_until or 0, row.message_id
