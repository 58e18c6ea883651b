"""The body of a job event that a publisher makes: its checks before it is sent, and its signature."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from trunkline_agent.errors import UsageError
from trunkline_agent.outbox.outbox import PendingEvent, content_fault
from trunkline_agent.wire.job_event import PERMISSION_REQUIRED, SCHEMA_VERSION, event_fault
from trunkline_agent.wire.signing import SIGNATURE_FIELD, Signer, sign_event, signed_bytes
from trunkline_agent.wire.strict_json import canonical, decode
from trunkline_agent.wire.unsafe_text import carries_token, unsafe_pattern


def event_body(
    job_id: str, event: str, detail: str, data: dict[str, Any] | None, secret: str
) -> dict[str, Any]:
    """Return the fields of a job event without its seq and its signature.

    Args:
        job_id: The job.
        event: The type of the event, such as `started`.
        detail: A text about the event for people.
        data: More fields, as JSON values.
        secret: The job's secret, which must not be in the event.

    Raises:
        UsageError: The event must not be sent. The message says why and does not have the secret.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    body: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "job_id": job_id,
        "event": event,
        "timestamp": now,
        "detail": detail,
        "data": {} if data is None else data,
    }
    fault = event_fault({**body, "seq": 1}) or _fault(body, secret)
    if fault is not None:
        raise UsageError(f"not sent: {fault}")
    return body


def signed_event(event: dict[str, Any], secret: str, payload_bytes: int) -> bytes:
    """Return an event, which has a seq, as signed canonical JSON.

    Raises UsageError if it has more than `payload_bytes` bytes.
    """
    payload = canonical(sign_event(event, secret))
    if len(payload) > payload_bytes:
        raise UsageError(f"the event has {len(payload)} bytes; at most {payload_bytes} are taken")
    return payload


def signed_anew(pending: PendingEvent, secret: str) -> bytes | None:
    """Return a pending event signed with the current secret, None when it is signed with it already."""
    event, _ = decode(pending.wire_bytes)
    if Signer(secret).verifies(signed_bytes(event), event["data"].get(SIGNATURE_FIELD)):
        return None
    return canonical(sign_event(event, secret))


def is_same_event(sent: dict[str, Any], body: dict[str, Any]) -> bool:
    """Return whether a sent event has the type, text and data of the event that is to be sent."""
    data = {k: v for k, v in sent["data"].items() if k != SIGNATURE_FIELD}
    return (sent["event"], sent["detail"], data) == (body["event"], body["detail"], body["data"])


def _fault(body: dict[str, Any], secret: str) -> str | None:
    if body["event"] == PERMISSION_REQUIRED and not body["detail"].strip():
        return f"detail: '{PERMISSION_REQUIRED}' must name the permission that it asks for"
    if carries_token(body):
        return "data.auth_token: a token must not travel in an event"
    if SIGNATURE_FIELD in body["data"]:
        return f"data.{SIGNATURE_FIELD}: only the publisher sets it"
    pattern = unsafe_pattern(body["detail"])
    if pattern is not None:
        return f"detail: contains text that looks like a {pattern} (docs: the table of unsafe texts)"
    return content_fault(body, secret)
