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
        body, kind = _list(_seen_by(own, message.sender, listeners)), LISTENERS_TAG
    else:
        _require(own.options.get(ALLOW_SCHEMAS), message, "schemas are")
        named = question.get("listener")
        found = [one for one in _seen_by(own, message.sender, listeners) if one.name == named]
        if not found:
            raise Faulty("value", "there is no listener of this name", "a name of <list/>")
        body, kind = _description(found[0]), DESCRIPTION_TAG
    return (Answer(message.sender, kind, META_NAMESPACE, body.decode("utf-8")),)


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


def _list(found: Sequence[ListenerInfo]) -> bytes:
    root = etree.Element(f"{{{META_NAMESPACE}}}{LISTENERS_TAG}", nsmap={None: META_NAMESPACE})
    for one in found:
        _listener(root, one)
    return canonical_bytes(root)


def _listener(parent: Any, one: ListenerInfo) -> Any:
    names = ("name", "root_tag", "namespace", "capability")
    attributes = {name: getattr(one, name) for name in names}
    return etree.SubElement(parent, f"{{{META_NAMESPACE}}}listener", attributes)


def _description(one: ListenerInfo) -> bytes:
    root = etree.Element(f"{{{META_NAMESPACE}}}{DESCRIPTION_TAG}", nsmap={None: META_NAMESPACE})
    element = _listener(root, one)
    for name, text in (("xsd", one.xsd), ("example", one.example)):
        if text is not None:
            etree.SubElement(element, f"{{{META_NAMESPACE}}}{name}").text = text
    return canonical_bytes(root)
