"""The receipt of a job event (JE-17) or of what an agent has said (JE-26): what the bridge publishes and the
sender waits for.
"""

from __future__ import annotations

import msgspec


class LogPosition(msgspec.Struct, frozen=True):
    """Where the event lies in the log."""

    partition: int
    offset: int


class Receipt(msgspec.Struct, frozen=True):
    """What became of one event. Matched on `ce_id` alone, the hash of topic and payload: a forger can copy
    a seq. `verdict` is None while the event is durable but not settled; None counts as delivered.
    `position` is None when the sender did not wait for a receipt.
    """

    ce_id: str
    seq: int | None = None
    verdict: str | None = None
    reason: str | None = None
    position: LogPosition | None = None


class AgentReceipt(msgspec.Struct, frozen=True):
    """What became of one payload of an agent's outbox; it comes on the inbox, where it is told from a message
    by having no `from`. The other fields are those of `Receipt`.
    """

    ce_id: str
    message_id: str | None = None
    seq: int | None = None
    verdict: str | None = None
    reason: str | None = None
    position: LogPosition | None = None
    kind: str = "receipt"
    schema_version: int = 1


_decoder = msgspec.json.Decoder(Receipt)
encode_receipt = msgspec.json.Encoder().encode


def read_receipt(payload: bytes) -> Receipt | None:
    """The receipt in an MQTT payload, None for anything else. Never raises."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
