"""The bounds of the fields of requests, and functions that make values beside them from a JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

_NAME, _NOTE, _SECONDS = (None, 128), (None, 500), (0.001, 31_622_400)
_MOST, _PER_MINUTE = (0, 2**63 - 1), (1, 2**63 - 1)
_FILE, _LIST = (1, 1024), (1, 1000)
BOUNDS: Final[dict[str, tuple[Any, Any]]] = {
    # Names and texts: the number of characters.
    **dict.fromkeys(("after", "agent_name", "capability", "capture_id", "in_reply_to", "lease_id"), _NAME),
    **dict.fromkeys(("message_ids[]", "principal", "recipient", "root", "session", "subscriber"), _NAME),
    **dict.fromkeys(("thread", "topic", "type", "host", "inReplyTo", "leaseId", "messageIds[]"), _NAME),
    "broadcast_message.type": (1, 128),
    "subject": (1, 200),
    "reason": _NOTE,
    "create_session.description": _NOTE,
    "register_job.description": (None, 4000),
    "submit_task.description": (None, 32_000),
    "register_participant.task": (None, 32_000),
    "spawn_participant.task": (1, 32_000),
    "error": (None, 2000),
    "cron": (None, 200),
    "handle": (None, 256),
    "public_key": (None, 4096),
    "url": (None, 2048),
    "message": (1, None),
    "contentType": (1, 128),
    # A job's own broker.
    "register_job.host": (1, 255),
    "port": (1, 65_535),
    "username": (1, 255),
    "password": (None, 1024),
    **dict.fromkeys(("ca_certs", "certfile", "keyfile"), _FILE),
    # Lists: the number of items.
    "capabilities": (None, 64),
    "message_ids": _LIST,
    "mark_messages_read.message_ids": (None, 1000),
    "messageIds": _LIST,
    "mark_read.messageIds": (None, 1000),
    "notify": (None, 2),
    "limit": _LIST,
    "lease_messages.limit": (1, 100),
    "read_blob.limit": (1, 2**20),
    # Times in seconds, but for `since`, and places.
    **dict.fromkeys(("deliver_after_s", "expires_in_s", "deliverAfterSeconds", "expiresInSeconds"), _SECONDS),
    **dict.fromkeys(("lease", "reply_lease", "leaseSeconds"), (1, 86_400)),
    **dict.fromkeys(("wait", "wait_reply"), (0, 300)),
    "timeoutSeconds": (0, 240),
    "every_s": (1, 31_536_000),
    "overlap_s": (0, 2_592_000),
    **dict.fromkeys(("newer_than_s", "older_than_s"), (0, 1e10)),
    **dict.fromkeys(("since", "offset"), (0, None)),
    # Limits of principals.
    **dict.fromkeys(("pending_most", "bytes_most", "live_jobs_most", "subscriptions_most"), _MOST),
    **dict.fromkeys(("messages_per_minute", "bytes_per_minute"), _PER_MINUTE),
    **dict.fromkeys(("agents{}", "jobs{}", "unconfirmed{}"), _PER_MINUTE),
    **dict.fromkeys(("agents", "jobs", "unconfirmed"), (None, 1000)),
}
"""The least and the most of a field by its name, or by those of its operation and itself. None: no bound."""
_LEAST: Final = ("minimum", "minLength", "minItems", "minProperties")
_MOST_NAMES: Final = ("maximum", "maxLength", "maxItems", "maxProperties")


def options(schema: dict[str, Any], parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the kinds of values that a schema allows."""
    found = []
    for one in schema.get("anyOf", [schema]):
        reference = one.get("$ref")
        found += [one] if reference is None else options(parts[reference.rpartition("/")[2]], parts)
    return found


def bounds_of(schema: dict[str, Any], parts: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Return the names of the bounded fields of a document, each with its least and most."""
    for one in options(schema, parts):
        least, most = (next((one[key] for key in keys if key in one), None) for keys in (_LEAST, _MOST_NAMES))
        if (least, most) != (None, None):
            yield name, least, most
        for field, kind in one.get("properties", {}).items():
            yield from bounds_of(kind, parts, field)
        if "items" in one:
            yield from bounds_of(one["items"], parts, f"{name}[]")
        if isinstance(one.get("additionalProperties"), dict):
            yield from bounds_of(one["additionalProperties"], parts, f"{name}{{}}")


def bounds_in_table(owner: str, name: str) -> tuple[Any, Any] | None:
    """Return the least and the most of a field of an operation or a tool."""
    return BOUNDS.get(f"{owner}.{name}", BOUNDS.get(name))


def wrong_values(schema: dict[str, Any], parts: dict[str, Any]) -> Iterator[Any]:
    """Return values that a JSON schema forbids: of another type, beyond a bound, and of another form."""
    found = options(schema, parts)
    kinds = {one.get("type", "string" if "enum" in one else None) for one in found}
    if None in kinds:
        return  # any JSON
    samples = {"null": None, "boolean": True, "string": "\x00", "array": [[]], "object": {"x": [1]}}
    yield from (value for kind, value in samples.items() if kind not in kinds or kind in ("string", "array"))
    if "string" in kinds:
        yield from ("bell \a", "\x1b[2J", "\x9b")
    if not kinds & {"integer", "number"}:
        yield 7
    for one in found:
        yield from beyond(one)
        if "enum" in one:
            yield "no-such-word"
        if "pattern" in one:
            yield from (text for text in ("", "a b", "../x") if not re.search(one["pattern"], text))
        if one.get("type") == "integer":
            yield from (1.5, "1")


def wrong_texts(schema: dict[str, Any]) -> Iterator[str]:
    """Return texts of a query that a JSON schema forbids."""
    for one in options(schema, {}):
        if one.get("type") in ("integer", "number"):
            yield from ("x", "")
            yield from map(str, beyond(one))
        if "enum" in one or one.get("type") == "boolean":
            yield "no-such-word"


def beyond(schema: dict[str, Any]) -> Iterator[Any]:
    """Return the values next to the bounds of a schema, outside."""
    for name, step in (("minimum", -1), ("maximum", 1)):
        if name in schema:
            yield schema[name] + step
    for name, step in (("minLength", -1), ("maxLength", 1)):
        if name in schema:
            yield "x" * (schema[name] + step)
    for name, step in (("minItems", -1), ("maxItems", 1)):
        if name in schema:
            yield ["a"] * (schema[name] + step)


def at_bounds(schema: dict[str, Any], parts: dict[str, Any]) -> Iterator[Any]:
    """Return the values at the bounds of a schema for numbers, inside."""
    for one in options(schema, parts):
        yield from (one[name] for name in ("minimum", "maximum") if name in one)
