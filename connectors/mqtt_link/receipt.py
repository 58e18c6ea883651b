"""The receipt of a job event (JE-17) or of an agent's message (JE-26).

The bridge publishes it, and the sender waits for it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class LogPosition(msgspec.Struct, frozen=True):
    """The position of a record in the log: Kafka's partition and offset."""

    partition: int
    offset: int


class Receipt(msgspec.Struct, frozen=True):
    """The receipt for one job event: the message to its publisher on the job's receipts topic.

    Publishers match it on `ce_id` alone, the hash of topic and payload, because a forger can copy a seq.
    `verdict` is None while the event is in the log but not settled; that counts as delivered. `reason` says why
    an event was rejected. `position` is None when the sender did not wait for a receipt.
    """

    ce_id: str
    seq: int | None = None
    verdict: str | None = None
    reason: str | None = None
    position: LogPosition | None = None


class AgentReceipt(msgspec.Struct, frozen=True):
    """The receipt for one message that an agent published on its outbox topic.

    The bridge publishes the receipt on the agent's inbox topic. Unlike a message there, a receipt has no field
    `from`. `message_id` is the id that the agent gave the message, None if it gave none. `retry_after_s` is the
    number of seconds after which the message may be sent again; None for a message that no limit refused. The
    other fields are those of `Receipt`; `position` is None for a message that the bridge refused, which is not
    in the log.
    """

    ce_id: str
    message_id: str | None = None
    seq: int | None = None
    verdict: str | None = None
    reason: str | None = None
    position: LogPosition | None = None
    kind: str = "receipt"
    schema_version: int = 1
    retry_after_s: int | None = None


_decoder = msgspec.json.Decoder(Receipt)
encode_receipt = msgspec.json.Encoder().encode


def read_payload(decoder: msgspec.json.Decoder[T], payload: bytes) -> T | None:
    """Decode an MQTT payload with `decoder`. Return None for a payload that it cannot decode. Never raises."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_receipt(payload: bytes) -> Receipt | None:
    """Decode a job event's receipt from an MQTT payload. Return None for any other payload. Never raises."""
    return read_payload(_decoder, payload)
