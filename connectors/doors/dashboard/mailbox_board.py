"""The mailboxes and webhooks as the dashboard shows them (DL-11, WH-05), one mailbox and one message."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any, Final

from connectors.doors.dashboard.shown_rows import RowView, milliseconds, shortened
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.webhooks.deliverer import DOWN_AFTER
from schemas.streams.mailboxes.message import (
    DEAD,
    DEFAULT_REALM,
    LEASED,
    PRIORITIES,
    UNREAD,
    MessageBodyRow,
    MessageRow,
)
from schemas.streams.principal.principals import OPERATOR
from schemas.streams.webhook.webhook_registry import ACTIVE, PAUSED, WebhookRow, url_parts
from trunkline_agent.wire.message_fields import DESCRIPTION

BODY_CHARACTERS: Final = 65_536
WAITING: Final = "waiting"
# The number of mailboxes and of webhooks that are shown. The sums include all.
SHOWN: Final = 200
_FAILING, _DOWN = "failing", "down"
_PLACES: Final = {_DOWN: 0, _FAILING: 1, PAUSED: 2, ACTIVE: 3}
_PLACE: Final = {priority: place for place, priority in enumerate(PRIORITIES)}
_MESSAGE: Final = RowView(
    MessageRow,
    "message_id sender kind priority attempts handed_to in_reply_to replay_of",
    texts="last_reason",
    moments="posted_at handed_at lease_until ended_at",
)


class MailboxBoard:
    """Mailboxes, their messages and webhooks as JSON, made from the live view at each call. Thread-safe.

    The index has every waiting and leased message, and the dead ones among the newest 50,000 final messages.
    """

    def __init__(self, hub: Hub) -> None:
        self._live_view = hub.live_view
        self._index = hub.mailboxes
        self._health = hub.webhook_health

    def depth(self, name: str) -> int:
        """Return the number of messages that wait in a mailbox of the realm `default`."""
        return self._index.depth((DEFAULT_REALM, name))

    def counted(self, name: str) -> dict[str, Any]:
        """Return a mailbox of the realm `default` with the numbers of its waiting, leased and dead messages.

        A message whose lease has run out counts as waiting.
        """
        mailbox = DEFAULT_REALM, name
        ready = self._index.ready(mailbox, time.time_ns() // 1000)
        return {
            "realm": DEFAULT_REALM,
            "recipient": name,
            WAITING: ready,
            LEASED: max(0, self._index.depth(mailbox) - ready),
            DEAD: self._index.dead_count(mailbox),
        }

    def deepest(self) -> dict[str, Any]:
        """Return the 200 deepest mailboxes as JSON, deepest first, and two sums over all mailboxes.

        The mailboxes are in the list `mailboxes`. A mailbox without a waiting message is in it if it has dead
        ones. `messages` is the number of all waiting messages, leased ones included. `total` is the number of
        mailboxes with a waiting or dead message. A mailbox's `oldest_ms` is when its oldest waiting message was
        posted, in milliseconds since 1970 UTC. `dead` is the number of its dead messages in memory.
        """
        messages, total = self._index.totals()
        return {
            "mailboxes": [
                {
                    "realm": found.mailbox[0],
                    "recipient": found.mailbox[1],
                    "depth": found.depth,
                    "dead": found.dead,
                    "oldest_ms": milliseconds(found.oldest),
                }
                for found in self._index.deepest(SHOWN)
            ],
            "messages": messages,
            "total": total,
        }

    def webhooks(self) -> dict[str, Any]:
        """Return up to 200 webhooks as JSON, those with a fault first, and the number of all not removed.

        Of a URL only the host is shown, because path and query may contain a secret. `state` is `paused`,
        `down` after three failed calls in a row, `failing` after one, or `active`. The calls are those of this
        gateway.
        """
        rows = [(self._webhook_state(row), row) for row in self._live_view.live(WebhookRow)]
        rows.sort(key=lambda one: (_PLACES[one[0]], one[1].webhook))
        return {"webhooks": [self._webhook(state, row) for state, row in rows[:SHOWN]], "total": len(rows)}

    def _webhook_state(self, row: WebhookRow) -> str:
        failures = self._health.of(row.webhook).failures_in_a_row
        if row.status == PAUSED:
            return PAUSED
        return _DOWN if failures >= DOWN_AFTER else _FAILING if failures else ACTIVE

    def _webhook(self, state: str, row: WebhookRow) -> dict[str, Any]:
        health, mailbox = self._health.of(row.webhook), (DEFAULT_REALM, row.webhook)
        return {
            "webhook": row.webhook,
            "state": state,
            "host": url_parts(row.url).host,
            "topic": row.topic,
            "pending": self._index.size(mailbox),
            "dead": self._index.dead_count(mailbox),
            "succeeded": health.succeeded,
            "failed": health.failed,
            "failures_in_a_row": health.failures_in_a_row,
            "last_success_ms": milliseconds(health.last_success_at),
            "last_failure_ms": milliseconds(health.last_failure_at),
            "why": shortened(row.why_paused if row.status == PAUSED else health.last_failure or None),
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
        dead = self._index.dead_of(mailbox)
        gone = [row for one in dead[:limit] if (row := self._row(mailbox, one)) is not None]

        def listed(rows: list[MessageRow], count: int) -> dict[str, Any]:
            return {"count": count, "messages": [self._as_json(row, now_us) for row in rows]}

        def pending(state: str, order: Callable[[MessageRow], Any]) -> dict[str, Any]:
            found = [row for row in rows if row is not None and _state(row, now_us) == state]
            return listed(heapq.nsmallest(limit, found, key=order), len(found))

        return {
            WAITING: pending(WAITING, lambda row: (_PLACE[row.priority], row.posted_at, row.message_id)),
            LEASED: pending(LEASED, lambda row: (row.lease_until or 0, row.message_id)),
            DEAD: listed(gone, len(dead)),
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

    def _as_json(self, row: MessageRow, now_us: int) -> dict[str, Any]:
        replays = self._index.replays((row.realm, row.recipient), row.message_id) if row.status == DEAD else []
        return {
            **_MESSAGE.of(row),
            "described": {
                one.label: value for one in DESCRIPTION if (value := getattr(row, one.name)) is not None
            },
            "state": _state(row, now_us),
            "sender_verified": row.from_verified,
            "replayed_as": replays[-1] if replays else None,
        }


def _state(row: MessageRow, now_us: int) -> str:
    """Return `waiting`, `leased`, or the final status of a message. An expired lease counts as none."""
    if row.status == UNREAD:
        return WAITING
    if row.status == LEASED:
        return LEASED if (row.lease_until or 0) > now_us else WAITING
    return row.status
