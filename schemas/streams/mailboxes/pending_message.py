"""A message of a mailbox that has no final status, as the mailbox's entries store it."""

from __future__ import annotations

import msgspec

from schemas.streams.mailboxes.message import LEASED, UNREAD, MessageRow
from trunkline_agent.wire.moments import has_come


class PendingMessage(msgspec.Struct, array_like=True, gc=False):
    """A message that is delayed, unread or leased, with the fields of its row in the view `mailbox`.

    `attempts_most` and `request_id` are the limit and the request of the newest lease. If the message is unread
    all the same, the lease expired; its holder can still acknowledge the message. Times are in microseconds
    since 1970 UTC, except for `sent_at` and `expires_at`, which are texts. `body_bytes` is the length of the
    body in UTF-8, with that of the blob, and `blob_bytes` that of the blob alone. The latter is 0 in an entry
    of fold version 11 or earlier.
    """

    version: int
    message_id: str
    priority: str
    posted_at: int
    status: str
    sender: str
    from_verified: bool
    kind: str
    from_task: str | None = None
    in_reply_to: str | None = None
    thread: str | None = None
    broadcast_id: str | None = None
    sent_at: str | None = None
    expires_at: str | None = None
    attempts: int = 0
    handed_to: str | None = None
    handed_at: int | None = None
    request_id: str | None = None
    lease_until: int | None = None
    parent_thread: str | None = None
    root_thread: str | None = None
    on_behalf_of: str | None = None
    attempts_most: int | None = None
    last_reason: str | None = None
    replay_of: str | None = None
    deliver_at: int | None = None
    body_bytes: int = 0
    topic: str | None = None
    blob: str | None = None
    blob_bytes: int = 0

    @property
    def answer_bytes(self) -> int:
        """The bytes of the message that count in an answer (`bytes_most` of a claim or lease): its body."""
        return self.body_bytes - self.blob_bytes

    def standing(self, now_us: int) -> str:
        """Return the message's status at the time `now_us`: `leased` or `unread`.

        `now_us` is in microseconds since 1970 UTC. A message whose lease has expired is `unread`, although the
        attribute `status` may still be `leased`.
        """
        is_held = self.status == LEASED and self.lease_until is not None and self.lease_until > now_us
        return LEASED if is_held else UNREAD

    def is_over(self, now_us: int) -> bool:
        """Return whether the message has expired: `expires_at` is at or before `now_us`.

        `now_us` is in microseconds since 1970 UTC. A message without `expires_at` never expires.
        """
        return self.expires_at is not None and has_come(self.expires_at, now_us)

    def row(self, realm: str, recipient: str, ended_as: str | None, now_us: int) -> MessageRow:
        """Return the message's row in the view `mailbox`, for the mailbox of `recipient` in `realm`.

        `ended_as` is the final status that the message has reached at the time `now_us` (microseconds since
        1970 UTC), or `None` if it has none.
        """
        return MessageRow(
            realm=realm,
            recipient=recipient,
            message_id=self.message_id,
            status=ended_as or self.status,
            sender=self.sender,
            from_verified=self.from_verified,
            from_task=self.from_task,
            kind=self.kind,
            priority=self.priority,
            in_reply_to=self.in_reply_to,
            thread=self.thread,
            broadcast_id=self.broadcast_id,
            sent_at=self.sent_at,
            expires_at=self.expires_at,
            posted_at=self.posted_at,
            attempts=self.attempts,
            handed_to=self.handed_to,
            handed_at=self.handed_at,
            request_id=self.request_id,
            lease_until=self.lease_until if ended_as is None else None,
            ended_at=None if ended_as is None else now_us,
            parent_thread=self.parent_thread,
            root_thread=self.root_thread,
            on_behalf_of=self.on_behalf_of,
            last_reason=self.last_reason,
            replay_of=self.replay_of,
            deliver_at=self.deliver_at,
            topic=self.topic,
            blob=self.blob,
        )
