"""The envelope `<message>` around an XML payload (XP-04): parse it, validate it, and write it for a recipient.

    opened = open_document(body)
    opened.to, opened.root_tag, opened.payload

`<from>` is only a claim of the sender. `wrapped` writes the sender that the pump knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from lxml import etree  # type: ignore[import-untyped]

from connectors.plumbing.xml_wire.documents import DEFAULT_LIMITS, Faulty, XmlLimits, XmlRefused, quoted
from connectors.plumbing.xml_wire.mending import NOT_XML, REPLACEMENT
from connectors.plumbing.xml_wire.safe_xml import repair, repair_answer
from trunkline_agent.wire.ids import is_name
from trunkline_agent.xml.envelope import ENVELOPE_NAMESPACE, canonical_bytes, root_name, wrapped

__all__ = [
    "ENVELOPE_NAMESPACE",
    "EXAMPLE",
    "TEXT_NAMESPACE",
    "OpenedMessage",
    "canonical_payload",
    "check_envelope",
    "content_of",
    "envelope_fault",
    "open_answer",
    "open_document",
    "text_payload",
    "wrapped",
]

TEXT_NAMESPACE: Final = "urn:trunkline:text:1"
_SPACE: Final = f"{{{ENVELOPE_NAMESPACE}}}"
_MESSAGE, _FROM, _TO, _THREAD = (f"{_SPACE}{name}" for name in ("message", "from", "to", "thread"))
_SCHEMA: Final = etree.XMLSchema(file=str(Path(__file__).with_name("envelope.xsd")))
_CLAIMED: Final = "<from> is ignored: the pump writes it itself"


@dataclass(frozen=True, slots=True)
class OpenedMessage:
    """The parts of an envelope, or a bare payload of a handler's answer.

    Attributes:
        to: the recipient in `<to>`; None: there is none.
        thread: the thread's UUID in `<thread>`; None: there is none.
        claimed_sender: the text of `<from>`, which is not trusted; None: there is none.
        root_tag: the tag of the payload element.
        namespace: its XML namespace, empty if it has none.
        payload: the payload element alone, as canonical XML.
        notes: one text for each change that the repair of the document made.
    """

    to: str | None
    thread: str | None
    claimed_sender: str | None
    root_tag: str
    namespace: str
    payload: bytes
    notes: tuple[str, ...] = ()


def open_document(data: bytes, limits: XmlLimits = DEFAULT_LIMITS) -> OpenedMessage:
    """Parse a document that must be one envelope with one payload, and return its parts.

    A document that is not well-formed is repaired; `notes` of the result lists the changes. Raises XmlRefused
    for a document that is too large, unsafe or cannot be repaired without loss: the caller drops it. Raises
    Faulty("envelope") for a wrong envelope: the caller answers the sender with a `<huh>`.
    """
    repaired = repair(data, limits)
    return _opened(repaired.root, repaired.notes, limits)


def open_answer(data: bytes, limits: XmlLimits = DEFAULT_LIMITS) -> list[OpenedMessage]:
    """Parse a handler's answer and return its payloads in order, bare or each in an envelope with its `<to>`.

    An answer that is not well-formed is repaired. Text around the payloads is left out. `notes` of each result
    lists these changes. An answer without payload and text gives an empty list. Raises XmlRefused for an answer
    that is too large or cannot be repaired, and Faulty for a wrong envelope or for text alone.
    """
    repaired = repair_answer(data, limits)
    root, notes = repaired.root, repaired.notes
    around = len((root.text or "").strip()) + sum(len((child.tail or "").strip()) for child in root)
    if not len(root):
        if around:
            raise Faulty("envelope", "the answer is text without any payload element", EXAMPLE, notes)
        return []
    if len(root) > limits.payloads:
        raise XmlRefused("too_large", f"{len(root)} payloads: an answer has {limits.payloads} at most")
    if around:
        notes += (f"left out: {around} characters around the payloads",)
    return [_answered(child, notes, limits) for child in root]


def text_payload(kind: str, body: str) -> bytes:
    """Return a message from another door, which is not XML, as the canonical payload `<text kind="…">`.

    `kind` is the message's type, and `body` becomes the text of the element. U+FFFD replaces each character
    that XML does not allow.
    """
    kind = escape(NOT_XML.sub(REPLACEMENT, kind), {'"': "&quot;", "\t": "&#x9;", "\n": "&#xA;", "\r": "&#xD;"})
    kind = kind.replace("&gt;", ">")
    body = escape(NOT_XML.sub(REPLACEMENT, body), {"\r": "&#xD;"})
    return f'<text xmlns="{TEXT_NAMESPACE}" kind="{kind}">{body}</text>'.encode()


def check_envelope(root: Any, notes: tuple[str, ...] = ()) -> None:
    """Raise Faulty("envelope") unless the lxml element `root` is an envelope that `envelope.xsd` accepts.

    The error says what is wrong, in words for the sender. `notes` are the notes of the document's repair, which
    become part of the error.
    """
    if root.tag != _MESSAGE or not _SCHEMA.validate(root):
        raise Faulty("envelope", envelope_fault(root, ENVELOPE_NAMESPACE), EXAMPLE, notes)


def canonical_payload(root: Any, notes: tuple[str, ...], limits: XmlLimits) -> bytes:
    """Return the payload of an envelope, which is the last child of the lxml element `root`, as canonical XML.

    Returns empty bytes for an envelope without children. Raises XmlRefused when the result is larger than
    `limits.document_bytes`, and Faulty when the payload has no canonical form. `notes` are the notes of the
    document's repair, which become part of a Faulty.
    """
    return _canonical(root[-1], notes, limits) if len(root) else b""


def content_of(root: Any, canonical: bytes, notes: tuple[str, ...]) -> OpenedMessage:
    """Return the parts of an envelope, an lxml element that `check_envelope` has accepted.

    Args:
        root: the envelope.
        canonical: its payload as canonical XML, from `canonical_payload`.
        notes: the notes of the document's repair, for the result.

    Raises:
        Faulty: the payload's root tag or namespace is not allowed.
    """
    to = thread = claimed = None
    *heads, payload = root
    for head in heads:
        text = (head.text or "").strip()
        tag = head.tag
        if tag == _TO:
            to = text
        elif tag == _THREAD:
            thread = text.lower()
        else:
            claimed = text
            notes = (*notes, _CLAIMED)
    namespace, tag = _root_name(payload, notes)
    return OpenedMessage(to, thread, claimed, tag, namespace, canonical, notes)


def _answered(child: Any, notes: tuple[str, ...], limits: XmlLimits) -> OpenedMessage:
    if child.tag not in (_MESSAGE, "message"):
        canonical = _canonical(child, notes, limits)
        namespace, tag = _root_name(child, notes)
        return OpenedMessage(None, None, None, tag, namespace, canonical, notes)
    return _opened(child, notes, limits)


def _opened(root: Any, notes: tuple[str, ...], limits: XmlLimits) -> OpenedMessage:
    canonical = canonical_payload(root, notes, limits)
    check_envelope(root, notes)
    return content_of(root, canonical, notes)


def _canonical(element: Any, notes: tuple[str, ...], limits: XmlLimits) -> bytes:
    try:
        canonical = canonical_bytes(element)
    except ValueError as error:
        raise Faulty("envelope", str(error), EXAMPLE, notes) from None
    if len(canonical) > limits.document_bytes:
        why = f"{len(canonical)} bytes in canonical form: {limits.document_bytes} at most"
        raise XmlRefused("too_large", why)
    return canonical


def _root_name(payload: Any, notes: tuple[str, ...]) -> tuple[str, str]:
    """Return namespace and root tag of a payload. Raises Faulty."""
    namespace, tag = root_name(payload)
    if not is_name(tag):
        why = f"the root tag <{quoted(tag)}> is not a name: ASCII letters, digits, '.', '_', '-', 128 at most"
        raise Faulty("payload", why, EXAMPLE, notes)
    if not namespace and tag == "message":
        # In an answer it would look like an envelope without its namespace.
        raise Faulty("envelope", "the payload is a <message> without a namespace of its own", EXAMPLE, notes)
    if namespace == ENVELOPE_NAMESPACE:
        why = f"<{quoted(tag)}> is in the envelope's namespace; give the payload its own xmlns"
        raise Faulty("envelope", why, EXAMPLE, notes)
    return namespace, tag


EXAMPLE: Final = (
    '<message xmlns="urn:trunkline:envelope:1"><to>NAME OF A LISTENER</to>'
    '<PAYLOAD xmlns="NAMESPACE OF THE PAYLOAD">…</PAYLOAD></message>'
)
_HEADS: Final = ("from", "to", "thread")


def envelope_fault(root: Any, namespace: str) -> str:
    """Return a text that says what is first wrong with an element as an envelope, for its sender to act on.

    Call it for an lxml element that the XSD has rejected, because the XSD's own errors are hard to understand.
    `namespace` is the namespace that an envelope must have.
    """
    name = etree.QName(root)
    if name.localname != "message":
        return f'a bare <{quoted(name.localname)}>: put it into an envelope, <message xmlns="{namespace}">'
    if name.namespace != namespace:
        found = f'has xmlns="{quoted(name.namespace)}"' if name.namespace else "has no xmlns"
        return f'<message> {found}; write <message xmlns="{namespace}">'
    if root.attrib:
        return f"<message> takes no attributes, it has {quoted(next(iter(root.attrib)))}"
    if (root.text or "").strip() or any((child.tail or "").strip() for child in root):
        return "there is text directly in <message>; put it into the payload"
    heads = [c for c in root if etree.QName(c).namespace == namespace and etree.QName(c).localname in _HEADS]
    payloads = [child for child in root if child not in heads]
    return _heads_fault(heads) or _payload_fault(payloads, namespace) or _order_fault(root, payloads)


def _heads_fault(heads: list[Any]) -> str:
    for head in heads:
        tag = etree.QName(head).localname
        if len(head):
            return f"<{tag}> holds only text; there is an element in it, perhaps because it is not closed"
        if head.attrib:
            return f"<{tag}> takes no attributes"
    tags = [etree.QName(head).localname for head in heads]
    twice = [tag for tag in _HEADS if tags.count(tag) > 1]
    return f"<{twice[0]}> occurs twice; send one message to each recipient" if twice else ""


def _payload_fault(payloads: list[Any], namespace: str) -> str:
    if not payloads:
        return "there is no payload; put one element after <to> and <thread>"
    if len(payloads) > 1:
        tags = ", ".join(f"<{quoted(etree.QName(payload).localname)}>" for payload in payloads[:3])
        return f"{len(payloads)} payloads ({tags}{', …' if len(payloads) > 3 else ''}); an envelope holds one"
    tag = etree.QName(payloads[0]).localname
    if etree.QName(payloads[0]).namespace == namespace:
        return f'the payload <{quoted(tag)}> has no namespace of its own; write <{quoted(tag)} xmlns="…">'
    return ""


def _order_fault(root: Any, payloads: list[Any]) -> str:
    tags = ["payload" if child in payloads else etree.QName(child).localname for child in root]
    order = [*(tag for tag in _HEADS if tag in tags), "payload"]
    if tags != order:
        return f"the order is {', '.join(order)}; it was {', '.join(tags)}"
    for tag, what in (("to", "the name of a listener: letters, digits, '.', '_', '-'"), ("thread", "a UUID")):
        text = root.findtext(f"{{*}}{tag}")
        if text is not None and tag in tags and not text.strip():
            return f"<{tag}> is empty; give {what}, or leave it out"
    wrong = []
    if "to" in tags:
        wrong.append("<to> is not the name of a listener (letters, digits, '.', '_', '-', 128 at most)")
    if "thread" in tags:
        wrong.append("<thread> is not a UUID")
    return " or ".join(wrong) or "it does not match the schema"
