"""The listener that describes the others (XP-14): it lists them and shows the payload that one takes.

The question is `<meta xmlns="urn:trunkline:meta:1"><list/></meta>`, or the same with `<describe
listener="NAME"/>` inside. The organism's file allows the answers to `admin` (the operator), `all` or `none`. A
listener that sees only some listeners gets only these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lxml import etree  # type: ignore[import-untyped]

from connectors.xml_payloads.deliveries import Answer, ListenerInfo
from connectors.xml_pump.handlers import ListenerMessage
from connectors.xml_wire.faults import Faulty, XmlLimits, XmlRefused
from connectors.xml_wire.safe_xml import canonical_bytes, repair
from schemas.streams.principal.principals import OPERATOR

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
    """Return the answer to a question about the listeners. Raises Faulty."""
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
