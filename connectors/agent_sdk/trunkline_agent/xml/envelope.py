"""The envelope `<message>` around an XML payload (XP-04): its names, and how it is written."""

from __future__ import annotations

import re
from typing import Any, Final
from xml.sax.saxutils import escape

from lxml import etree  # type: ignore[import-untyped]

ENVELOPE_NAMESPACE: Final = "urn:trunkline:envelope:1"
_DEFAULT_NAMESPACE: Final = re.compile(rb"<[^\s:>]+ xmlns=\"[^\"]")


def wrapped(payload: bytes, *, sender: str | None, to: str | None, thread: str | None) -> bytes:
    """Return the XML document for a recipient: an envelope around a payload.

    Args:
        payload: the payload element as canonical XML. It is not checked.
        sender: the name of the verified sender, for `<from>`; None: no `<from>`.
        to: the name of the recipient; None: no `<to>`.
        thread: the UUID of the thread; None: no `<thread>`.
    """
    # With a prefix for the envelope, a payload without a default namespace does not inherit the envelope's.
    prefix = "" if _DEFAULT_NAMESPACE.match(payload) else "m:"
    lines = [f'<{prefix}message xmlns{":m" if prefix else ""}="{ENVELOPE_NAMESPACE}">']
    for name, value in (("from", sender), ("to", to), ("thread", thread)):
        if value is not None:
            lines.append(f"<{prefix}{name}>{escape(value)}</{prefix}{name}>")
    return "".join(lines).encode() + payload + f"</{prefix}message>".encode()


def canonical_bytes(element: Any) -> bytes:
    """Return an lxml element in exclusive canonical form (C14N), without comments and the text after it.

    Raises ValueError for a namespace that is not an absolute URI, because the meaning of a relative one depends
    on the place of the document.
    """
    try:
        return bytes(etree.tostring(element, method="c14n", exclusive=True, with_comments=False))
    except etree.C14NError:
        raise ValueError("a namespace is not an absolute URI, such as urn:example:calculator:1") from None


def root_name(element: Any) -> tuple[str, str]:
    """Return the namespace of an lxml element, empty if it has none, and its root tag."""
    name = element.tag
    namespace, _, tag = name[1:].rpartition("}") if name[0] == "{" else ("", "", name)
    return namespace, tag
