"""A message as it is published on an agent's inbox, and the record that claims it once the broker has it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from connectors.mqtt_bridge.bridge_records import DOOR
from schemas.streams.mailboxes.mailbox_requests import claim_of_record
from schemas.wire.message import DEFAULT_REALM, has_come
from schemas.wire.record import OutgoingRecord
from schemas.wire.strict_json import canonical

_NAMESPACE: Final = uuid.UUID("0d9a5b5e-94c3-4f0b-8f5e-7b3a6f1c2e41")
_SAME: Final = (
    "message_id",
    "from_verified",
    "kind",
    "body",
    "content_type",
    "priority",
    "in_reply_to",
    "thread",
    "broadcast_id",
    "sent_at",
    "posted_at",
    "expires_at",
)


def wire_message(row: Mapping[str, Any]) -> bytes:
    """The payload for a row of the mailbox, as the gateway shows it."""
    return canonical({"schema_version": 1, "from": row["sender"], **{name: row[name] for name in _SAME}})


def is_over(row: Mapping[str, Any], now_s: float) -> bool:
    """Whether the message's time is over."""
    return row["expires_at"] is not None and has_come(str(row["expires_at"]), int(now_s * 1e6))


def claim_of(agent: str, message_ids: Sequence[str]) -> OutgoingRecord:
    """The record that says that these were handed out. The same again is the same, whoever says it."""
    request_id = str(uuid.uuid5(_NAMESPACE, "/".join((agent, *message_ids))))
    return claim_of_record(DEFAULT_REALM, agent, request_id, message_ids, door=DOOR, principal=agent)
