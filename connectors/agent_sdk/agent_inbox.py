"""What comes on an agent's inbox: messages of its mailbox, and receipts for what it has said. Where the broker
is not ours, strangers may write there as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from connectors.mqtt_link.receipt import AgentReceipt
from schemas.wire.strict_json import MalformedJsonError, decode


class InboxMessage(NamedTuple):
    """A message for the agent; `fields` is all that came. `from_verified` is what the hub says of the sender:
    worth nothing on a broker where others than the bridge may write to the inbox.
    """

    message_id: str
    sender: str
    from_verified: bool
    kind: str
    body: str
    fields: dict[str, Any]


class _Message(msgspec.Struct):
    message_id: str
    sender: str = msgspec.field(name="from")
    from_verified: bool
    kind: str
    body: str


def read_inbox(payload: bytes) -> InboxMessage | AgentReceipt | None:
    """A message, which has a `from`, or a receipt, which has none; None for anything else. Never raises."""
    try:
        fields = decode(payload)[0]
        if not isinstance(fields, dict) or "from" not in fields:
            return msgspec.convert(fields, AgentReceipt)
        found = msgspec.convert(fields, _Message)
    except (MalformedJsonError, msgspec.MsgspecError):
        return None
    return InboxMessage(found.message_id, found.sender, found.from_verified, found.kind, found.body, fields)
