"""The exchange between gateway and pump: listeners, leased messages, and the outcome with its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec
import orjson

from connectors.xml_wire.envelope import open_answer
from connectors.xml_wire.faults import Faulty, XmlLimits, XmlRefused
from schemas.streams.control.organism import CONCURRENCY, TIMEOUT_MS
from schemas.wire.ids import is_name

_Kind = TypeVar("_Kind")


class ListenerInfo(msgspec.Struct, frozen=True, rename={"name": "listener"}):
    """An active listener. The fields are those of its row, with `options` decoded."""

    name: str
    root_tag: str
    type: str = "handler"
    capability: str = ""
    namespace: str = ""
    handler: str | None = None
    xsd: str | None = None
    example: str | None = None
    visible_tools: frozenset[str] | None = None
    concurrency: int = CONCURRENCY
    tokens_per_minute: int | None = None
    timeout_ms: int = TIMEOUT_MS
    options: dict[str, Any] = {}

    def sees(self, name: str) -> bool:
        """Return whether the listener may know of the listener with this name (XP-09)."""
        return name != self.name and (self.visible_tools is None or name in self.visible_tools)


_NAMES: Final = {"sender_verified": "from_verified", "is_orphan": "listener_gone"}


class LeasedMessage(msgspec.Struct, frozen=True, rename=_NAMES):
    """A message that this pump handles now. `is_orphan`: its listener was removed."""

    listener: str
    message_id: str
    request_id: str
    sender: str
    kind: str
    body: str
    sender_verified: bool = False
    content_type: str = ""
    thread: str = ""
    is_reply: bool = False
    timeout_ms: int = TIMEOUT_MS
    is_orphan: bool = False


def listener_from(row: Mapping[str, Any]) -> ListenerInfo:
    """Return a listener from its row as JSON. Raises ValueError, msgspec.ValidationError."""
    return _from_json({**row, "options": orjson.loads(row.get("options") or "{}")}, ListenerInfo)


def leased_from(message: Mapping[str, Any]) -> LeasedMessage:
    """Return a leased message from JSON. Raises msgspec.ValidationError."""
    return _from_json(message, LeasedMessage)


def _from_json(found: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    # A field that is null gets its default.
    return msgspec.convert({name: value for name, value in found.items() if value is not None}, kind)


HANDLED: Final = "handled"
HUH: Final = "huh"
NACK: Final = "nack"
_REASON_LIMIT: Final = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """One payload that a listener answers. `to` None means each listener of its root tag, or the sender."""

    to: str | None
    kind: str
    namespace: str
    body: str


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a message.

    With `huh`, the one answer says what was wrong; with `nack`, the lease is given back.
    """

    message: LeasedMessage
    outcome: Literal["handled", "huh", "nack"]
    reason: str = ""
    answers: Sequence[Answer] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as the gateway reads it."""
        return {
            "listener": self.message.listener,
            "message_id": self.message.message_id,
            "request_id": self.message.request_id,
            "outcome": self.outcome,
            "reason": self.reason[:_REASON_LIMIT],
            "answers": [asdict(answer) for answer in self.answers],
        }


class AnswerFault(ValueError):
    """A listener's answer cannot be used. `str()` says why, without quoting it."""


_NAMESPACE_LIMIT: Final = 200


def payloads_of(answer: object, limits: XmlLimits) -> list[Answer]:
    """Return the payloads of an answer: bare, or each in an envelope with its `<to>`. None is no answer.

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
            raise AnswerFault("its answer has a <to> that is not a valid name")
        # An underscore may begin an element, but no root tag.
        if not one.root_tag[0].isalpha() or len(one.namespace) > _NAMESPACE_LIMIT:
            raise AnswerFault("its answer has a root tag or a namespace that no listener can have")
        found.append(Answer(one.to, one.root_tag, one.namespace, one.payload.decode("utf-8")))
    return found
