"""Listeners without a handler: language models (XP-15), and `meta`, which describes the others (XP-14).

A model sees the conversation and its tools, and says what is next. One message leads to one question to the
model. The conversation is in the log, so any pump may ask the next time. The model gets the conversation up to
the message that came, with the answers that it still waits for. It may call the listeners that it was given. A
call of any other listener is sent the same way and answered with a `<huh>`, because the model cannot know of it
(XP-09).

The meta listener lists the others and shows the payload that one takes. The question is `<meta
xmlns="urn:trunkline:meta:1"><list/></meta>`, or the same with `<describe listener="NAME"/>` inside. The
organism's file allows the answers to `admin` (the operator), `all` or `none`. A listener that sees only some
listeners gets only these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lxml import etree  # type: ignore[import-untyped]

from connectors.doors.xml_pump.handlers import ConversationMessage, HandlerContext, ListenerMessage
from connectors.doors.xml_pump.listener_table import (
    RAW_ARGUMENT,
    ChatMessage,
    Completion,
    ListenerTable,
    RunnableListener,
    ToolCall,
)
from connectors.doors.xml_pump.pipeline import TEXT_TAG
from connectors.plumbing.xml_payloads.deliveries import Answer, AnswerFault, ListenerInfo, payloads_of
from connectors.plumbing.xml_payloads.huh import HUH_TAG
from connectors.plumbing.xml_payloads.payload_types import PayloadType
from connectors.plumbing.xml_payloads.shapes import Record
from connectors.plumbing.xml_wire.documents import Faulty, XmlLimits, XmlRefused
from connectors.plumbing.xml_wire.envelope import TEXT_NAMESPACE, text_payload
from connectors.plumbing.xml_wire.safe_xml import canonical_bytes, repair
from schemas.streams.principal.principals import OPERATOR

ANSWER_KIND: Final = "answer"
_HISTORY: Final = 200
_NOT_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]")


async def answer_llm(
    listener: RunnableListener,
    message: ListenerMessage,
    message_id: str,
    context: HandlerContext,
    table: ListenerTable,
    limits: XmlLimits,
) -> tuple[Sequence[Answer], int]:
    """Ask a language model about a message, and return its answers as messages, and the number of tokens.

    Waits for the model until the caller cancels the call. No answers mean that the model waits for listeners
    that it has called. The answers are not sent here.

    Args:
        listener: The listener of the language model, with its client.
        message: The message that came for this listener.
        message_id: The id of the message.
        context: The conversation, and the listeners that the model may call.
        table: All listeners, to write calls in the form that each listener takes.
        limits: The limits for the XML of answers.

    Raises:
        AnswerFault: The client's result is no usable answer. Errors of the client itself are raised, too.
    """
    info, client = listener.info, listener.client
    assert client is not None  # noqa: S101  a listener of this type has a client
    said = _up_to(message_id, await context.history(_HISTORY), message)
    completion = await client.complete(
        str(info.options.get("model") or ""),
        str(info.options.get("system_prompt") or ""),
        conversation(said, {str(tool["name"]) for tool in context.tools}),
        context.tools,
    )
    if not isinstance(completion, Completion):
        raise AnswerFault("the language model's client returned no Completion")
    answers = [_call(call, table, limits) for call in completion.calls]
    if completion.text:
        answers += _text(completion.text, limits)
    return answers, completion.tokens


def conversation(said: Sequence[ConversationMessage], tools: set[str]) -> list[ChatMessage]:
    """Convert a conversation into messages for a language model, in the same order.

    If listeners that the model called have not answered yet, a remark that names them is added at the end.

    Args:
        said: The messages of the conversation, oldest first.
        tools: The names of the listeners that the model may call.
    """
    own = {one.message_id for one in said if one.is_own}
    found = []
    for one in said:
        if one.is_own:
            found.append(ChatMessage("assistant", one.to or "", one.body, one.message_id))
        elif one.in_reply_to in own or one.sender in tools or one.kind == HUH_TAG:
            found.append(ChatMessage("tool", one.sender, one.body, one.in_reply_to))
        else:
            found.append(ChatMessage("user", one.sender, one.body))
    answered = {one.in_reply_to for one in said if not one.is_own}
    waited_for = [one.to for one in said if one.is_own and one.to in tools and one.message_id not in answered]
    if waited_for:
        names = ", ".join(str(name) for name in waited_for)
        remark = f"No answer yet from: {names}. Say nothing and call nobody to wait for them."
        found.append(ChatMessage("system", "", remark))
    return found


def _up_to(
    message_id: str, said: Sequence[ConversationMessage], message: ListenerMessage
) -> Sequence[ConversationMessage]:
    """Return the conversation as it was when the message came.

    Two answers that arrive together lead to two questions to the model, and only the second one contains both.
    """
    for place, one in enumerate(said):
        if one.message_id == message_id:
            return said[: place + 1]
    last = ConversationMessage(
        message_id, message.sender, None, message.root_tag, message.xml.decode("utf-8"), False, None
    )
    return [*said, last]


def _call(call: ToolCall, table: ListenerTable, limits: XmlLimits) -> Answer:
    """Return a call as a message.

    Arguments that do not fit the listener's own form are sent as text, and the listener answers what it takes.
    """
    name = _NOT_A_NAME.sub("_", call.name)[:128].lstrip("._-") or "nobody"
    kind = table.kind_of(call.name)
    if kind is not None:
        body = arguments_as_xml(kind, call.arguments)
        if body is not None:
            return Answer(name, kind.root_tag, kind.namespace, body.decode("utf-8"))
    raw = call.arguments.get(RAW_ARGUMENT)
    if kind is None and isinstance(raw, str):
        found = _payloads(raw, limits)
        if len(found) == 1:
            return Answer(name, found[0].kind, found[0].namespace, found[0].body)
    shown = json.dumps(call.arguments, ensure_ascii=False, default=str)
    return Answer(name, TEXT_TAG, TEXT_NAMESPACE, text_payload("call", shown).decode("utf-8"))


def _payloads(text: str, limits: XmlLimits) -> list[Answer]:
    try:
        return payloads_of(text.encode("utf-8", "replace"), limits)
    except AnswerFault:
        return []


def _text(text: str, limits: XmlLimits) -> list[Answer]:
    """Return the payloads that a model's text holds if it is XML, else the text as one payload."""
    if text.lstrip().startswith("<") and (found := _payloads(text, limits)):
        return found
    body = text_payload(ANSWER_KIND, text)
    if len(body) > limits.document_bytes:
        raise AnswerFault("the language model's text is too large")
    return [Answer(None, TEXT_TAG, TEXT_NAMESPACE, body.decode("utf-8"))]


def arguments_as_xml(kind: PayloadType, arguments: Mapping[str, Any]) -> bytes | None:
    """Convert the JSON arguments of a model's call into the XML payload of the type `kind`.

    `arguments` is a JSON object as Python values. The payload is not checked here. The called listener checks
    it, and the model learns from its error message. None means that XML cannot represent the arguments.
    """
    root = etree.Element(kind.qualified_tag, nsmap={None: kind.namespace})
    try:
        _fill(root, kind.shape, arguments, kind.namespace)
        return canonical_bytes(root)
    except (ValueError, TypeError, RecursionError):
        return None


def _fill(element: Any, shape: Record, values: Mapping[str, Any], namespace: str) -> None:
    slots = {slot.name: slot for slot in shape.slots}
    for name in {**slots, **values}:
        value, slot = values.get(name), slots.get(name)
        if value is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            child = etree.SubElement(element, f"{{{namespace}}}{name}")
            if isinstance(item, Mapping) and slot is not None and isinstance(slot.shape, Record):
                _fill(child, slot.shape, item, namespace)
            elif isinstance(item, (Mapping, list)):
                child.text = json.dumps(item, ensure_ascii=False)
            else:
                child.text = str(item).lower() if isinstance(item, bool) else str(item)


META_NAMESPACE: Final = "urn:trunkline:meta:1"
META_TAG: Final = "meta"
LISTENERS_TAG: Final = "listeners"
DESCRIPTION_TAG: Final = "description"
ALLOW_LIST: Final = "allow_list_capabilities"
ALLOW_SCHEMAS: Final = "allow_schema_requests"
ADMIN, ALL, NONE = "admin", "all", "none"
_EXPECTED: Final = (
    f'<meta xmlns="{META_NAMESPACE}"><list/></meta> or '
    f'<meta xmlns="{META_NAMESPACE}"><describe listener="NAME"/></meta>'
)


def answer_meta(
    own: ListenerInfo,
    message: ListenerMessage,
    listeners: Mapping[str, ListenerInfo],
    limits: XmlLimits,
) -> Sequence[Answer]:
    """Return the answer of the listener `meta` to a question about the listeners: a list or a description.

    A `<huh>` or another reply asks nothing, and gets no answer (an empty sequence).

    Args:
        own: The description of the listener `meta`, whose options say who may ask.
        message: The question.
        listeners: All listeners by name. The sender learns only of listeners that it sees.
        limits: The limits for the question's XML.

    Raises:
        Faulty: The question is wrong, the sender may not ask it, or there is no such listener.
    """
    if message.root_tag != META_TAG:
        # A <huh> or another reply asks nothing.
        return ()
    question = _question(message.xml, limits)
    tag = etree.QName(question).localname
    if tag == "list":
        _require(own.options.get(ALLOW_LIST), message, "lists of the listeners are")
        return _answer(message, LISTENERS_TAG, _seen_by(own, message.sender, listeners))
    _require(own.options.get(ALLOW_SCHEMAS), message, "schemas are")
    named = question.get("listener")
    found = [one for one in _seen_by(own, message.sender, listeners) if one.name == named]
    if not found:
        raise Faulty("value", "there is no listener of this name", "a name of <list/>")
    return _answer(message, DESCRIPTION_TAG, found, ("xsd", "example"))


def _question(payload: bytes, limits: XmlLimits) -> Any:
    try:
        root = repair(payload, limits).root
    except XmlRefused as error:
        raise Faulty("payload", str(error), _EXPECTED) from None
    inside = [child for child in root if isinstance(child.tag, str)]
    if root.tag != f"{{{META_NAMESPACE}}}{META_TAG}" or len(inside) != 1 or len(inside[0]):
        raise Faulty("payload", "a question about the listeners has one element in <meta>", _EXPECTED)
    if inside[0].tag not in (f"{{{META_NAMESPACE}}}list", f"{{{META_NAMESPACE}}}describe"):
        raise Faulty("payload", "<meta> holds neither <list/> nor <describe/>", _EXPECTED)
    return inside[0]


def _require(allowed: object, message: ListenerMessage, what: str) -> None:
    is_operator = message.sender == OPERATOR and message.sender_verified
    if allowed == ALL or (allowed == ADMIN and is_operator):
        return
    raise Faulty("value", f"{what} not given to you", "a payload that was described to you before")


def _seen_by(own: ListenerInfo, sender: str, listeners: Mapping[str, ListenerInfo]) -> list[ListenerInfo]:
    asks = listeners.get(sender)
    others = [one for one in listeners.values() if one.name != own.name]
    return sorted((one for one in others if asks is None or asks.sees(one.name)), key=lambda one: one.name)


def _answer(
    message: ListenerMessage, tag: str, found: Sequence[ListenerInfo], documents: Sequence[str] = ()
) -> Sequence[Answer]:
    """Return the answer with these listeners, each with those of the documents that it has."""
    root = etree.Element(f"{{{META_NAMESPACE}}}{tag}", nsmap={None: META_NAMESPACE})
    for one in found:
        attributes = {name: getattr(one, name) for name in ("name", "root_tag", "namespace", "capability")}
        element = etree.SubElement(root, f"{{{META_NAMESPACE}}}listener", attributes)
        for name in documents:
            if (text := getattr(one, name)) is not None:
                etree.SubElement(element, f"{{{META_NAMESPACE}}}{name}").text = text
    return (Answer(message.sender, tag, META_NAMESPACE, canonical_bytes(root).decode("utf-8")),)
