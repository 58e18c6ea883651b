"""A message of a mailbox that has no final status, as the mailbox's entries store it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

import msgspec

from schemas.streams.mailboxes.message import LEASED, UNREAD, MessageRow
from trunkline_agent.wire.moments import has_come

LEASE_MS_MOST: Final = 86_400_000
"""The longest lease in milliseconds: a day."""
CLOCK_AHEAD_US: Final = 3_600_000_000
"""The clocks of two brokers differ by less than this hour."""


def is_of_a_wrong_clock(logged_us: int, now_us: int) -> bool:
    """Return whether a record's time is so far ahead of the log's present time that a broker's clock was wrong.

    Both are in microseconds since 1970 UTC.
    """
    return logged_us - now_us > CLOCK_AHEAD_US


def is_lease_held(until_us: int, now_us: int) -> bool:
    """Return whether a lease that ends at `until_us` is held at `now_us`, both in microseconds since 1970 UTC.

    A lease that ends later than the longest one could was made while a broker's clock was wrong. It counts as
    expired.
    """
    return now_us < until_us <= now_us + LEASE_MS_MOST * 1000 + CLOCK_AHEAD_US


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
    hops: int | None = None
    subject: str | None = None

    @property
    def answer_bytes(self) -> int:
        """The bytes of the message that count in an answer (`bytes_most` of a claim or lease): its body."""
        return self.body_bytes - self.blob_bytes

    def standing(self, now_us: int) -> str:
        """Return the message's status at the time `now_us`: `leased` or `unread`.

        `now_us` is in microseconds since 1970 UTC. A message whose lease has expired is `unread`, although the
        attribute `status` may still be `leased`. A lease that began under a wrong clock has expired.
        """
        is_leased = self.status == LEASED and self.lease_until is not None
        return LEASED if is_leased and is_lease_held(self.lease_until or 0, now_us) else UNREAD

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
        lease_until = self.lease_until if ended_as is None else None
        ended_at = None if ended_as is None else now_us
        first = (realm, recipient, self.message_id, ended_as or self.status)
        values: tuple[Any, ...] = (*first, *_before(self), lease_until, ended_at, *_after(self))
        return MessageRow(*values)


# The fields of the row, but for its first four and its two ends, are as the entry has them.
_FIELDS: Final = MessageRow.__struct_fields__
_ENDS: Final = _FIELDS.index("lease_until")
_before: Final = attrgetter(*_FIELDS[4:_ENDS])
_after: Final = attrgetter(*_FIELDS[_ENDS + 2 :])
