"""The fields of a message on an agent's inbox topic over MQTT (JE-26)."""

from __future__ import annotations

from typing import Final

INBOX_FIELDS: Final = (
    "message_id",
    "from_verified",
    "kind",
    "body",
    "content_type",
    "priority",
    "in_reply_to",
    "thread",
    "broadcast_id",
    "topic",
    "blob",
    "blob_bytes",
    "blob_type",
    "sent_at",
    "posted_at",
    "expires_at",
)
"""The fields that a message has under the same name as the row of the mailbox.

Beside them the payload has `schema_version` and the sender as `from`.
"""
