"""The check of a payload before it is sent: it is well-formed, and means the same everywhere."""

from __future__ import annotations

import re
from typing import Any, Final

from lxml import etree  # type: ignore[import-untyped]

from trunkline_agent.errors import UsageError
from trunkline_agent.terminal_text import quoted
from trunkline_agent.wire.ids import is_name
from trunkline_agent.xml.envelope import ENVELOPE_NAMESPACE, canonical_bytes, root_name

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
