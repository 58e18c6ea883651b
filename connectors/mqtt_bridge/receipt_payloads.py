"""The JSON of the payloads that bridges exchange over MQTT, by msgspec: faster than the library of agents."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from trunkline_agent.wire.receipt import AgentReceipt, Receipt

T = TypeVar("T")

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
