"""Listeners and leased messages as the gateway tells a pump of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from schemas.streams.control.organism import CONCURRENCY, TIMEOUT_MS


@dataclass(frozen=True, slots=True)
class ListenerInfo:
    """An active listener; the fields are those of its row, `options` decoded."""

    name: str
    type: str
    capability: str
    root_tag: str
    namespace: str
    handler: str | None
    xsd: str | None
    example: str | None
    visible_tools: frozenset[str] | None
    concurrency: int
    tokens_per_minute: int | None
    timeout_ms: int
    options: Mapping[str, Any]

    def sees(self, name: str) -> bool:
        """Whether it may know of the listener of this name (XP-09)."""
        return name != self.name and (self.visible_tools is None or name in self.visible_tools)


@dataclass(frozen=True, slots=True)
class LeasedMessage:
    """A message that this pump handles now. `is_orphan`: its listener was removed."""

    listener: str
    message_id: str
    request_id: str
    sender: str
    sender_verified: bool
    kind: str
    content_type: str
    body: str
    thread: str
    is_reply: bool
    timeout_ms: int
    is_orphan: bool


def listener_from(row: Mapping[str, Any]) -> ListenerInfo:
    """A listener from its row as JSON. Raises KeyError, ValueError."""
    visible, options = row.get("visible_tools"), row.get("options")
    return ListenerInfo(
        name=row["listener"],
        type=row.get("type") or "handler",
        capability=row.get("capability") or "",
        root_tag=row["root_tag"],
        namespace=row.get("namespace") or "",
        handler=row.get("handler"),
        xsd=row.get("xsd"),
        example=row.get("example"),
        visible_tools=None if visible is None else frozenset(visible),
        concurrency=row.get("concurrency") or CONCURRENCY,
        tokens_per_minute=row.get("tokens_per_minute"),
        timeout_ms=row.get("timeout_ms") or TIMEOUT_MS,
        options=orjson.loads(options) if options else {},
    )


def leased_from(message: Mapping[str, Any]) -> LeasedMessage:
    """A leased message from JSON. Raises KeyError."""
    return LeasedMessage(
        listener=message["listener"],
        message_id=message["message_id"],
        request_id=message["request_id"],
        sender=message["sender"],
        sender_verified=bool(message.get("from_verified")),
        kind=message["kind"],
        content_type=message.get("content_type") or "",
        body=message["body"],
        thread=message.get("thread") or "",
        is_reply=bool(message.get("is_reply")),
        timeout_ms=message.get("timeout_ms") or TIMEOUT_MS,
        is_orphan=bool(message.get("listener_gone")),
    )
