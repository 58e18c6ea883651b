"""The payloads on an agent's inbox topic over MQTT: messages, and receipts for sent messages (JE-26)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from trunkline_agent.wire.receipt import AgentReceipt, agent_receipt
from trunkline_agent.wire.strict_json import MalformedJsonError, decode

_TEXTS: Final = ("message_id", "from", "kind", "body")


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


def read_inbox(payload: bytes) -> InboxMessage | AgentReceipt | None:
    """Decode an MQTT payload that came on an agent's inbox topic: a message, or a receipt for a sent message.

    Any other payload, such as one that a stranger published on a broker that is not ours, gives None. It never
    raises.
    """
    try:
        fields = decode(payload)[0]
    except MalformedJsonError:
        return None
    if not isinstance(fields, dict):
        return None
    if "from" not in fields:
        return agent_receipt(fields)
    texts = [fields.get(name) for name in _TEXTS]
    verified = fields.get("from_verified")
    if type(verified) is not bool or any(type(text) is not str for text in texts):
        return None
    message_id, sender, kind, body = (str(text) for text in texts)
    return InboxMessage(message_id, sender, verified, kind, body, fields)
