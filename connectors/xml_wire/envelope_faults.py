"""What is wrong with an envelope, in words that its writer can act on. The schema has only said that it is."""

from __future__ import annotations

from typing import Any, Final

from lxml import etree  # type: ignore[import-untyped]

from connectors.xml_wire.xml_faults import quoted

EXAMPLE: Final = (
    '<message xmlns="urn:trunkline:envelope:1"><to>NAME OF A LISTENER</to>'
    '<PAYLOAD xmlns="NAMESPACE OF THE PAYLOAD">…</PAYLOAD></message>'
)
_HEADS: Final = ("from", "to", "thread")


def envelope_fault(root: Any, namespace: str) -> str:
    """The first thing that is wrong with `root` as an envelope of `namespace`."""
    name = etree.QName(root)
    if name.localname != "message":
        return f'a bare <{quoted(name.localname)}>: put it into an envelope, <message xmlns="{namespace}">'
    if name.namespace != namespace:
        found = f'has xmlns="{quoted(name.namespace)}"' if name.namespace else "has no xmlns"
        return f'<message> {found}; write <message xmlns="{namespace}">'
    if root.attrib:
        return f"<message> takes no attributes, it has {quoted(next(iter(root.attrib)))}"
    if (root.text or "").strip() or any((child.tail or "").strip() for child in root):
        return "text stands in <message> itself; text belongs into the payload"
    heads = [c for c in root if etree.QName(c).namespace == namespace and etree.QName(c).localname in _HEADS]
    payloads = [child for child in root if child not in heads]
    return _heads_fault(heads) or _payload_fault(payloads, namespace) or _order_fault(root, payloads)


def _heads_fault(heads: list[Any]) -> str:
    for head in heads:
        tag = etree.QName(head).localname
        if len(head):
            return f"<{tag}> holds text only; there is an element in it, perhaps because it is not closed"
        if head.attrib:
            return f"<{tag}> takes no attributes"
    tags = [etree.QName(head).localname for head in heads]
    twice = [tag for tag in _HEADS if tags.count(tag) > 1]
    return f"<{twice[0]}> stands there twice; send one message to each" if twice else ""


def _payload_fault(payloads: list[Any], namespace: str) -> str:
    if not payloads:
        return "there is no payload; one element belongs behind <to> and <thread>"
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
    wrong = (
        "<to> is no name of a listener (letters, digits, '.', '_', '-', 128 at most)" if "to" in tags else ""
    )
    return (
        " or ".join(filter(None, [wrong, "<thread> is no UUID" if "thread" in tags else ""])) or "not as asked"
    )
