"""The envelope `<message>` around an XML payload (XP-04), and the check that a payload is well-formed."""

from __future__ import annotations

import re
from copy import deepcopy
from itertools import chain
from typing import Any, Final
from xml.sax.saxutils import escape

from lxml import etree  # type: ignore[import-untyped]

from trunkline_agent.errors import UsageError
from trunkline_agent.terminal_text import quoted
from trunkline_agent.wire.ids import is_name

ENVELOPE_NAMESPACE: Final = "urn:trunkline:envelope:1"
_PREFIX: Final = re.compile(r"(?<![\w.:-])([^\W\d][\w.-]*):(?=[^\W\d])")
# Not the prefix that only the envelope has: a payload must not get more of it each time it is wrapped.
_DECLARED: Final = re.compile(rf" xmlns:([^=\s]+)=\"(?!{re.escape(ENVELOPE_NAMESPACE)}\")")
# The canonical form looks for each of them at each element.
_PREFIXES_MOST: Final = 32
_DEFAULT_NAMESPACE: Final = re.compile(rb"<[^\s:>]+ xmlns=\"[^\"]")
_DEPTH_MOST: Final = 64
# A text in these parts declares nothing. Each ends at its first end mark, as it does for a parser.
_NO_MARKUP: Final = re.compile(rb"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<\?.*?\?>", re.DOTALL)
_DECLARATION: Final = re.compile(rb"<!\s*(?:DOCTYPE|ENTITY|ELEMENT|ATTLIST|NOTATION)", re.IGNORECASE)


def new_parser(*, recover: bool = False) -> Any:
    """Return an lxml parser that expands nothing and fetches nothing; with `recover`, it mends broken XML."""
    return etree.XMLParser(
        encoding="utf-8",  # set here, so that the document's declaration is ignored
        recover=recover,
        resolve_entities=False,
        load_dtd=False,
        dtd_validation=False,
        attribute_defaults=False,
        no_network=True,
        huge_tree=False,
        collect_ids=False,
    )


def safe_root(data: bytes) -> Any:
    """Parse a document and return its root as an lxml element. Nothing is expanded, fetched or repaired.

    Raises ValueError for a document that is not well-formed, has a DOCTYPE or is not UTF-8. The error's text
    names the place.
    """
    # Before the parser sees it: libxml2 reads an external DTD even if it is told not to load one.
    if b"<!" in data and _DECLARATION.search(_NO_MARKUP.sub(b"", data)):
        raise ValueError("a DOCTYPE or another declaration: no document may have one; leave it out")
    try:
        return etree.fromstring(data, new_parser())
    except etree.XMLSyntaxError as error:
        raise ValueError(quoted(error.msg or "no XML", 200)) from None


def checked_payload(payload: str | bytes | Any) -> bytes:
    """Return a payload in canonical form, with which every listener reads the same.

    Args:
        payload: One XML element, as text, as UTF-8 bytes, or as an element of lxml or `xml.etree`. Comments and
            processing instructions are left out.

    Raises:
        UsageError: The payload is not well-formed, has a DOCTYPE, is nested deeper than 64 elements, has a
            namespace that is not an absolute URI, or is an envelope itself.
    """
    try:
        root = safe_root(_bytes_of(payload))
        etree.strip_tags(root, etree.Comment, etree.PI)
        namespace, tag = root_name(root)
        if not is_name(tag):
            raise ValueError(f"<{quoted(tag)}> is no name: ASCII letters, digits, '.', '_', '-', 128 at most")
        if namespace == ENVELOPE_NAMESPACE or (not namespace and tag == "message"):
            raise ValueError("a <message> is the envelope, which is added; give the payload alone")
        if etree.XPath(f"boolean({'/*' * (_DEPTH_MOST + 1)})")(root):
            raise ValueError(f"nested deeper than {_DEPTH_MOST} elements")
        return canonical_bytes(root)
    except ValueError as error:
        raise UsageError(f"the payload cannot be sent: {error}", reason="malformed") from None


def _bytes_of(payload: Any) -> bytes:
    if isinstance(payload, bytes | bytearray):
        return bytes(payload)
    if isinstance(payload, str):
        # Its declaration, if there is one, does not count: a text has no encoding.
        return payload.encode("utf-8")
    if isinstance(payload, etree._Element):
        return bytes(etree.tostring(payload, with_tail=False))
    from xml.etree import ElementTree

    if isinstance(payload, ElementTree.Element):
        return bytes(ElementTree.tostring(payload, encoding="utf-8"))
    raise ValueError(f"expected XML text or an element, found {type(payload).__name__}")


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
