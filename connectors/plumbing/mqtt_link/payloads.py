"""The payloads that bridges exchange over MQTT, as JSON by msgspec: faster than the library of agents."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from trunkline_agent.wire.receipt import AgentReceipt, Receipt

T = TypeVar("T")

MQTT_DOOR: Final = "mqtt"
"""The door of the records that a bridge appends."""
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
"""The fields that a message on an agent's inbox topic (JE-26) has under the same name as the mailbox's row.

Beside them the payload has `schema_version` and the sender as `from`.
"""
_encode = msgspec.json.Encoder().encode


def encode_receipt(receipt: Receipt | AgentReceipt) -> bytes:
    """Return the MQTT payload of a receipt: a JSON object with all its fields."""
    return _encode(receipt)


def read_payload(decoder: msgspec.json.Decoder[T], payload: bytes) -> T | None:
    """Decode an MQTT payload with `decoder`. Return None for a payload that it cannot decode. Never raises."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
