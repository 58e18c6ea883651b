"""What a listener answered, taken apart into payloads (XP-06), each fit to be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from connectors.xml_wire.envelope import open_answer
from connectors.xml_wire.faults import Faulty, XmlLimits, XmlRefused
from schemas.streams.control.organism import CONCURRENCY, TIMEOUT_MS
from schemas.wire.ids import is_name


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


HANDLED: Final = "handled"
HUH: Final = "huh"
NACK: Final = "nack"
_REASON_LIMIT: Final = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """One payload that a listener answers. `to` None: to every listener of its root tag, or to who asked."""

    to: str | None
    kind: str
    namespace: str
    body: str


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a message. `huh`: the one answer says what was wrong; `nack`: it is given back."""

    message: LeasedMessage
    outcome: Literal["handled", "huh", "nack"]
    reason: str = ""
    answers: Sequence[Answer] = ()

    def as_json(self) -> dict[str, Any]:
        """As the gateway takes it."""
        return {
            "listener": self.message.listener,
            "message_id": self.message.message_id,
            "request_id": self.message.request_id,
            "outcome": self.outcome,
            "reason": self.reason[:_REASON_LIMIT],
            "answers": [
                {"to": a.to, "kind": a.kind, "namespace": a.namespace, "body": a.body} for a in self.answers
            ],
        }


class AnswerFault(ValueError):
    """A listener's answer cannot be used; `str()` says why, without quoting it."""


_NAMESPACE_LIMIT: Final = 200


def payloads_of(answer: object, limits: XmlLimits) -> list[Answer]:
    """The payloads of an answer: bare, or each in an envelope with its `<to>`. None is no answer.

    Raises AnswerFault, which says what was wrong and quotes nothing.
    """
    if answer is None:
        return []
    if not isinstance(answer, bytes):
        raise AnswerFault(f"a handler answers with bytes or None, not with {type(answer).__name__}")
    try:
        opened = open_answer(answer, limits)
    except XmlRefused as error:
        what = "is too large" if error.reason == "too_large" else "is no XML"
        raise AnswerFault(f"its answer {what}: {error}") from None
    except Faulty as fault:
        raise AnswerFault(f"its answer cannot be sent: {fault.why}") from None
    found = []
    for one in opened:
        if one.to is not None and not is_name(one.to):
            raise AnswerFault("its answer has a <to> that is no name")
        # An underscore may begin an element, but no root tag.
        if not one.root_tag[0].isalpha() or len(one.namespace) > _NAMESPACE_LIMIT:
            raise AnswerFault("its answer has a root tag or a namespace that no listener can have")
        found.append(Answer(one.to, one.root_tag, one.namespace, one.payload.decode("utf-8")))
    return found
