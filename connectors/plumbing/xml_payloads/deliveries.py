"""The data that gateway and pump exchange: listeners, leased messages, and outcomes with answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec
import orjson

from connectors.plumbing.xml_wire.documents import Faulty, XmlLimits, XmlRefused
from connectors.plumbing.xml_wire.envelope import open_answer
from schemas.streams.control.organism import CONCURRENCY, TIMEOUT_MS
from trunkline_agent.wire.ids import is_name

_Kind = TypeVar("_Kind")


class ListenerInfo(msgspec.Struct, frozen=True, rename={"name": "listener"}):
    """An active listener of the XML pump, as the gateway describes it to the pump.

    The fields are those of its row in the registry of listeners, with `options` decoded from JSON.
    `visible_tools` names the listeners that are described to it; None: all.
    """

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
        """Return whether the listener `name` is described to this listener, for example as a tool (XP-09).

        False for its own name and for names that are not in `visible_tools`.
        """
        return name != self.name and (self.visible_tools is None or name in self.visible_tools)


_NAMES: Final = {"sender_verified": "from_verified", "is_orphan": "listener_gone"}


class LeasedMessage(msgspec.Struct, frozen=True, rename=_NAMES):
    """A message that the gateway has leased to this pump for one listener.

    `body` is the payload as text, and `kind` its root tag or the message's type. `is_orphan` means that the
    listener was removed after the message was sent. `timeout_ms` limits the time of the handler. `request_id`
    is the id of the lease.
    """

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
    """Return the listener that a row of the gateway's JSON answer describes.

    `row` is one of the objects under `listeners`. Raises ValueError for options that are not JSON, and
    msgspec.ValidationError for a missing field or one of the wrong type.
    """
    return _from_json({**row, "options": orjson.loads(row.get("options") or "{}")}, ListenerInfo)


def leased_from(message: Mapping[str, Any]) -> LeasedMessage:
    """Return the leased message that an object of the gateway's JSON answer describes.

    `message` is one of the objects under `messages`. Raises msgspec.ValidationError for a missing field or one
    of the wrong type.
    """
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
    """One XML payload with which a listener answers a message.

    Attributes:
        to: the listener to send the payload to; None: each listener of its root tag, or the sender of the
            message.
        kind: the root tag.
        namespace: the XML namespace of the root tag.
        body: the payload as text.
    """

    to: str | None
    kind: str
    namespace: str
    body: str

    def as_json(self) -> dict[str, Any]:
        """Return the answer as the JSON object that the gateway expects."""
        return {"to": self.to, "kind": self.kind, "namespace": self.namespace, "body": self.body}


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a leased message: `handled`, `huh` or `nack`, with the answers to send.

    With `huh`, the only answer is a `<huh>` that says what was wrong with the message. With `nack`, there are
    no answers: the pump gives the lease back, and the message is leased again until it has used up its
    attempts. `reason` says why.
    """

    message: LeasedMessage
    outcome: Literal["handled", "huh", "nack"]
    reason: str = ""
    answers: Sequence[Answer] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as the JSON object that the gateway expects. `reason` is cut to 200 characters."""
        return {
            "listener": self.message.listener,
            "message_id": self.message.message_id,
            "request_id": self.message.request_id,
            "outcome": self.outcome,
            "reason": self.reason[:_REASON_LIMIT],
            "answers": [answer.as_json() for answer in self.answers],
        }


class AnswerFault(ValueError):
    """A listener's answer cannot be sent. The text says why, without quoting the answer."""


_NAMESPACE_LIMIT: Final = 200


def payloads_of(answer: object, limits: XmlLimits) -> list[Answer]:
    """Parse the bytes that a handler returned, and return the XML payloads in them as answers.

    Bytes that are not well-formed XML are repaired if no part is lost.

    Args:
        answer: the handler's result: bytes with any number of payloads, each bare or in an envelope whose
            `<to>` names a listener. None means no answer, and gives an empty list.
        limits: the limits for the size, depth and number of payloads.

    Raises:
        AnswerFault: the result is not bytes, is no XML even after repair, or is too large. Or a `<to>`, a root
            tag or a namespace in it is not valid.
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
