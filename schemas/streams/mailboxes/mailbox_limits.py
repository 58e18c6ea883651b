"""How many messages and bytes a mailbox may have (LM-01): its own limits, and what it has now."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from schemas.fold.view_rows import Moment, Row

MAILBOX_LIMITS: Final = "mailbox_limits"
# The limit of a mailbox for which no other was set.
PENDING_DEFAULT: Final = 100_000


class MailboxLimitRow(Row, frozen=True, gc=False):
    """A row of `mailbox_limits`: the limits that were set for one mailbox."""

    VIEW: ClassVar = MAILBOX_LIMITS
    KEY: ClassVar = ("realm", "recipient")

    realm: str
    """Namespace of the mailbox."""
    recipient: str
    """Recipient within the realm."""
    pending_most: int | None
    """Largest number of messages without a final status. Null: no limit of its own."""
    bytes_most: int | None
    """Largest number of bytes of the bodies and blobs of these messages. Null: no limit of its own."""
    limited_by: str
    """Principal that set the limits, as `<door>/<principal>`."""
    limited_at: Moment
    """Time at which the limits were set."""


class OwnLimits(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The limits of a mailbox's own, as its state stores them. `None`: the limit that a posting carries."""

    version: int
    pending_most: int | None = None
    bytes_most: int | None = None


class MailboxSize(msgspec.Struct, array_like=True, gc=False):
    """The number of messages of a mailbox without a final status, and the bytes of their bodies and blobs.

    Messages from before fold version 11 count, and their bytes do not.
    """

    version: int
    messages: int = 0
    body_bytes: int = 0
