"""The envelope `<message>` around an XML payload (XP-04): its names, and how it is written."""

from __future__ import annotations

import re
from copy import deepcopy
from itertools import chain
from typing import Any, Final
from xml.sax.saxutils import escape

from lxml import etree  # type: ignore[import-untyped]

ENVELOPE_NAMESPACE: Final = "urn:trunkline:envelope:1"
_PREFIX: Final = re.compile(r"(?<![\w.:-])([^\W\d][\w.-]*):(?=[^\W\d])")
# Not the prefix that only the envelope has: a payload must not get more of it each time it is wrapped.
_DECLARED: Final = re.compile(rf" xmlns:([^=\s]+)=\"(?!{re.escape(ENVELOPE_NAMESPACE)}\")")
# The canonical form looks for each of them at each element.
_PREFIXES_MOST: Final = 32
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

    A prefix that a text or the value of an attribute uses, as in `p:thing`, keeps its declaration: it is in the
    InclusiveNamespaces PrefixList of Exclusive XML Canonicalization, section 3. Where an element with a prefix
    declares a default namespace, as `xs:schema` does for the types that it names without a prefix, the form is
    the inclusive one, with all declarations inside `element`.

    Raises ValueError for a namespace that is not an absolute URI, because the meaning of a relative one depends
    on the place of the document, for more than 32 prefixes in contents, and for one of them that is declared
    outside while the inclusive form is needed.
    """
    try:
        kept = _prefixes_in_content(element)
        if len(kept) > _PREFIXES_MOST:
            raise ValueError(f"its contents use {len(kept)} prefixes of namespaces: {_PREFIXES_MOST} at most")
        if _has_hidden_default(element):
            return _inclusive(element, kept)
        return bytes(
            etree.tostring(
                element, method="c14n", exclusive=True, with_comments=False, inclusive_ns_prefixes=kept or None
            )
        )
    except etree.C14NError:
        raise ValueError("a namespace is not an absolute URI, such as urn:example:calculator:1") from None


def _prefixes_in_content(element: Any) -> list[str]:
    """Return the declared prefixes that stand before a colon in a text or a value of an attribute, sorted."""
    values = (value for one in element.iter(etree.Element) for value in one.attrib.values())
    texts = [text for text in chain(element.itertext(), values) if ":" in text]
    named = set(_PREFIX.findall("\0".join(texts)))
    if not named:
        return []
    # The inclusive form has all declarations in scope.
    written = etree.tostring(element, method="c14n", with_comments=False).decode("utf-8")
    return sorted(named.intersection(_DECLARED.findall(written)))


def _has_hidden_default(element: Any) -> bool:
    """Return whether an element with a prefix, here or inside, declares a default namespace."""
    if all(one.prefix is None for one in element.iter(etree.Element)):
        return False
    is_declared = False
    # `nsmap` would collect all declarations in scope for each element.
    for event, found in etree.iterwalk(element, events=("start-ns", "start")):
        if event == "start-ns":
            is_declared = is_declared or found[0] == ""
        elif is_declared and found.prefix is not None:
            return True
        else:
            is_declared = False
    return False


def _inclusive(element: Any, kept: list[str]) -> bytes:
    """Return the inclusive form of an element on its own, which declares the prefixes `kept`.

    The exclusive form would need `#default` in its PrefixList, which lxml does not pass on.
    """
    alone = deepcopy(element)
    alone.tail = None
    written = bytes(etree.tostring(alone, method="c14n", with_comments=False))
    missing = set(kept).difference(_DECLARED.findall(written.decode("utf-8")))
    if missing:
        raise ValueError(f"declare the prefix {min(missing)} in the payload itself, not outside of it")
    return written


def root_name(element: Any) -> tuple[str, str]:
    """Return the namespace of an lxml element, empty if it has none, and its root tag."""
    name = element.tag
    namespace, _, tag = name[1:].rpartition("}") if name[0] == "{" else ("", "", name)
    return namespace, tag
