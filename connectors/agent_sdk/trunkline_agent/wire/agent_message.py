"""The payloads that an agent publishes over MQTT (JE-26)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from trunkline_agent.wire.ids import is_name
from trunkline_agent.wire.message_fields import (
    DURATION_S_LEAST,
    DURATION_S_MOST,
    EXPIRES_FIRST,
    MESSAGE_FIELDS,
    expires_first,
    is_duration,
)
from trunkline_agent.wire.signing import SIGNATURE_FIELD, Signer
from trunkline_agent.wire.strict_json import INT_MAX, canonical

KIND_LIMIT: Final = 128
# The most messages that one payload on the outbox confirms.
CONFIRMS_MOST: Final = 100
PRIORITIES: Final = ("low", "normal", "high")
_USER: Final = "agent."
_NAMES: Final = ("message_id", "to")
_DURATIONS: Final = ("expires_in_s", "deliver_after_s")


def mqtt_user(agent_name: str) -> str:
    """Return the user name with which an agent logs in at the MQTT broker: `agent.<name>`.

    It differs from the user name of every job, which begins with 8 hex digits.
    """
    return f"{_USER}{agent_name}"


def agent_of_user(user: str) -> str | None:
    """Return the agent's name in an MQTT user name `agent.<name>`, or `None` for any other user name."""
    name = user.removeprefix(_USER)
    return name if user.startswith(_USER) and is_name(name) else None


def said_bytes(said: dict[str, Any]) -> bytes:
    """Return the bytes of an outbox payload that are signed: its canonical JSON without `hmac_sig`.

    `said` is the decoded payload and does not change.
    """
    return canonical({key: value for key, value in said.items() if key != SIGNATURE_FIELD})


def sign_said(said: dict[str, Any], secret: str) -> dict[str, Any]:
    """Return a copy of an outbox payload with its signature by the agent's secret in `hmac_sig`.

    `said` has the fields of `AgentSaid` or of `AgentConfirmed`. An existing signature is replaced.
    """
    return {**said, SIGNATURE_FIELD: Signer(secret).hexdigest(said_bytes(said))}


def confirmation(message_ids: Sequence[str], secret: str) -> dict[str, Any]:
    """Return the signed payload with which an agent confirms messages that it has received.

    `message_ids` are at most `CONFIRMS_MOST` ids. Without any, the payload says that the agent is connected:
    the bridge then publishes at once, again, what the agent has not confirmed.
    """
    return sign_said({"schema_version": 1, "confirms": list(message_ids)}, secret)


def message_fault(message: dict[str, Any]) -> str | None:
    """Check the fields of a decoded message that an agent publishes on its outbox. Its body may be any JSON.

    Returns `field: explanation` for the first invalid field, or `None` if all are valid. Never raises. Unknown
    fields are allowed. The pydantic model `AgentSaid` of the product decides the same; a property test compares
    the two.
    """
    get = message.get
    if "schema_version" in message and (type(get("schema_version")) is not int or get("schema_version") != 1):
        return "schema_version: expected 1"
    for field in _NAMES:
        if not _is_name(get(field)):
            return f"{field}: expected a name: letters, digits, '.', '_', '-', first a letter or digit"
    kind = get("kind")
    if type(kind) is not str or not 1 <= len(kind) <= KIND_LIMIT:
        return f"kind: expected text of 1 to {KIND_LIMIT} characters"
    if "body" not in message:
        return "body: expected any JSON value"
    if get("priority", "normal") not in PRIORITIES:
        return "priority: expected one of " + ", ".join(PRIORITIES)
    for field in _DURATIONS:
        if get(field) is not None and not is_duration(get(field)):
            return f"{field}: expected {DURATION_S_LEAST} to {DURATION_S_MOST} seconds"
    for one in MESSAGE_FIELDS:
        if why := one.fault(get(one.name), is_name):
            return f"{one.name}: {why}"
    seq = get("seq")
    if type(seq) is not int or not 1 <= seq <= INT_MAX:
        return "seq: expected an integer from 1"
    if expires_first(get("deliver_after_s"), get("expires_in_s")):
        return f"expires_in_s: {EXPIRES_FIRST}"
    return None


def _is_name(value: object) -> bool:
    return type(value) is str and is_name(value)
