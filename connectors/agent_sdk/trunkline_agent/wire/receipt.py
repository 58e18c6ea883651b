"""The receipt of a job event (JE-17) or of an agent's message (JE-26).

The bridge publishes it, and the sender waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from trunkline_agent.wire.strict_json import MalformedJsonError, decode

_KIND: Final = "receipt"


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The position of a record in the log: Kafka's partition and offset."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Receipt:
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


@dataclass(frozen=True, slots=True)
class AgentReceipt:
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
    kind: str = _KIND
    schema_version: int = 1
    retry_after_s: int | None = None


def read_receipt(payload: bytes) -> Receipt | None:
    """Decode a job event's receipt from an MQTT payload. Return None for any other payload. Never raises."""
    try:
        fields = decode(payload)[0]
        return Receipt(**_shared(fields)) if isinstance(fields, dict) else None
    except (MalformedJsonError, _NotAReceipt):
        return None


def agent_receipt(fields: dict[str, Any]) -> AgentReceipt | None:
    """Return the receipt for an agent's message with these fields, or None if they are not those of a receipt.

    Args:
        fields: A decoded JSON object. Unknown fields are ignored.
    """
    try:
        kind, version = fields.get("kind", _KIND), fields.get("schema_version", 1)
        if type(kind) is not str or type(version) is not int:
            return None
        return AgentReceipt(
            **_shared(fields),
            message_id=_optional(fields, "message_id", str),
            kind=kind,
            schema_version=version,
            retry_after_s=_optional(fields, "retry_after_s", int),
        )
    except _NotAReceipt:
        return None


class _NotAReceipt(Exception):
    """A field is missing or has another type."""


def _shared(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that both kinds of receipts have."""
    ce_id = fields.get("ce_id")
    if type(ce_id) is not str:
        raise _NotAReceipt
    return {
        "ce_id": ce_id,
        "seq": _optional(fields, "seq", int),
        "verdict": _optional(fields, "verdict", str),
        "reason": _optional(fields, "reason", str),
        "position": _position(fields.get("position")),
    }


def _optional(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if value is not None and type(value) is not kind:
        raise _NotAReceipt
    return value


def _position(value: object) -> LogPosition | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _NotAReceipt
    partition, offset = value.get("partition"), value.get("offset")
    if type(partition) is not int or type(offset) is not int:
        raise _NotAReceipt
    return LogPosition(partition, offset)
