"""The receipt of a job event (JE-17) or of an agent's message (JE-26).

The bridge publishes it, and the sender waits for it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class LogPosition(msgspec.Struct, frozen=True):
    """The position of the event in the log."""

    partition: int
    offset: int


class Receipt(msgspec.Struct, frozen=True):
    """The confirmation of one event.

    It is matched on `ce_id` alone, the hash of topic and payload, because a forger can copy a seq. `verdict` is
    None while the event is durable but not settled; that counts as delivered. `position` is None when the
    sender did not wait for a receipt.
    """

    ce_id: str
    seq: int | None = None
    verdict: str | None = None
    reason: str | None = None
    position: LogPosition | None = None


class AgentReceipt(msgspec.Struct, frozen=True):
    """The confirmation of one message of an agent. Its other fields are those of `Receipt`.

    It comes on the agent's inbox. Unlike a message there, it has no `from`.
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


def read_payload(decoder: msgspec.json.Decoder[T], payload: bytes) -> T | None:
    """Return what `decoder` reads in an MQTT payload, None for anything else. Never raises."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_receipt(payload: bytes) -> Receipt | None:
    """Return the receipt in an MQTT payload, None for anything else. Never raises."""
    return read_payload(_decoder, payload)
