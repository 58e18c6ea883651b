"""The payloads on an agent's inbox topic over MQTT: messages, and receipts for sent messages (JE-26)."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from connectors.mqtt_link.receipt import AgentReceipt
from trunkline_agent.wire.strict_json import MalformedJsonError, decode


class InboxMessage(NamedTuple):
    """A message for the agent, as it came over MQTT. `fields` has all fields of the JSON object by name.

    `from_verified` says whether the hub authenticated the sender. Do not rely on it at a broker where other
    clients than the bridge may write to the inbox.
    """

    message_id: str
    sender: str
    from_verified: bool
    kind: str
    body: str
    fields: dict[str, Any]


class _WireMessage(msgspec.Struct):
    message_id: str
    sender: str = msgspec.field(name="from")
    from_verified: bool
    kind: str
    body: str


def read_inbox(payload: bytes) -> InboxMessage | AgentReceipt | None:
    """Decode an MQTT payload that came on an agent's inbox topic: a message, or a receipt for a sent message.

    Any other payload, such as one that a stranger published on a broker that is not ours, gives None. It never
    raises.
    """
    try:
        fields = decode(payload)[0]
        if not isinstance(fields, dict) or "from" not in fields:
            return msgspec.convert(fields, AgentReceipt)
        found = msgspec.convert(fields, _WireMessage)
    except (MalformedJsonError, msgspec.MsgspecError):
        return None
    return InboxMessage(found.message_id, found.sender, found.from_verified, found.kind, found.body, fields)
