"""Safe parsing of XML from unknown senders (XP-02, XP-03): nothing is expanded, fetched or silently lost.

    repaired = repair(data)
    canonical_bytes(repaired.root)

A well-formed document is parsed once, strictly. Only a document that is not well-formed is repaired
(`mending`), and each change is a note. Any DOCTYPE is refused before a parser sees it. The word may be in a
comment or a CDATA section of a well-formed document. A document with the word that is not well-formed is
refused, because in broken XML it is not clear where a comment ends.
"""

from __future__ import annotations

import html
import re
import threading
from dataclasses import dataclass
from typing import Any, Final

from lxml import etree  # type: ignore[import-untyped]

from connectors.plumbing.xml_wire.documents import DEFAULT_LIMITS, Kind, XmlLimits, XmlRefused, quoted, tokens
from connectors.plumbing.xml_wire.mending import Mended, mended, proven_notes
from trunkline_agent.xml.envelope import canonical_bytes, new_parser

__all__ = ["Repaired", "canonical_bytes", "guarded", "repair", "repair_answer", "tidied"]

_DECLARATION: Final = re.compile(rb"<!\s*(?:DOCTYPE|ENTITY|ELEMENT|ATTLIST|NOTATION)", re.IGNORECASE)
_XML_DECLARATION: Final = re.compile(rb"\s*<\?xml\s[^>]*?\bencoding\s*=\s*[\"']?([^\"'?>\s]*)", re.IGNORECASE)
_ENCODINGS: Final = {b"utf-8", b"utf8", b"us-ascii", b"ascii"}
_REFERENCE_IN_NAMESPACE: Final = re.compile(rb"xmlns[^\s=<>]*+\s*+=\s*+(?:\"[^\"&]*+&|'[^'&]*+&)")
_INSTANCE: Final = "{http://www.w3.org/2001/XMLSchema-instance}"
_VALUE: Final = re.compile(r"""=\s*+(?:"[^"]*+"|'[^']*+')""").findall
_LOCAL: Final = threading.local()
# In a smaller document, no namespace can be long and used often enough to do harm.
_SMALL_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Repaired:
    """A parsed XML document: its lxml tree, and one note for each change made to it.

    A well-formed document has notes only for comments and the like that were left out.
    """

    root: Any
    notes: tuple[str, ...] = ()


def repair(data: bytes, limits: XmlLimits = DEFAULT_LIMITS, *, root_tag: str = "message") -> Repaired:
    """Parse an XML document, repairing it if it is not well-formed, and return the tree with notes.

    There is one note for each kind of change; no notes mean that nothing was changed. Comments, processing
    instructions and hints where to fetch a schema are removed from the tree, with a note.

    Args:
        data: the bytes from the sender.
        limits: the limits of a document.
        root_tag: the element to look for when there is prose around the XML.

    Raises:
        XmlRefused: the document is over a limit, has a DOCTYPE, is not UTF-8, or cannot be repaired without
            loss.
    """
    data, is_strict = guarded(data, limits)
    return _tree(data, data, root_tag, limits, is_strict)


def repair_answer(data: bytes, limits: XmlLimits = DEFAULT_LIMITS) -> Repaired:
    """Parse a handler's answer, repairing it if need be, and return the tree with notes of the changes.

    The answer may have any number of elements at the top. They become the children of a root `<answer>`. Raises
    XmlRefused when the answer is over a limit, has a DOCTYPE, is not UTF-8, or cannot be repaired without loss.
    """
    data, is_strict = guarded(data, limits)
    if data.startswith(b"<?xml") and (end := data.find(b"?>")) > 0:
        data = data[end + 2 :]
    return _tree(b"<answer>" + data + b"</answer>", data, None, limits, is_strict)


def _tree(document: bytes, source: bytes, root_tag: str | None, limits: XmlLimits, is_strict: bool) -> Repaired:
    """Parse a document, and mend its source if it is not well-formed and may be mended."""
    try:
        root = etree.fromstring(document, _parser())
    except etree.XMLSyntaxError as error:
        if is_strict or _is_beyond(error):
            raise _refused(error, is_strict) from None
        return _repaired(mended(source.decode(), root_tag), limits)
    return Repaired(root, tidied(root, document, limits))


def guarded(data: bytes, limits: XmlLimits) -> tuple[bytes, bool]:
    """Check a document before any parser sees it: its size, its encoding, and that it has no DOCTYPE.

    Args:
        data: the bytes from the sender.
        limits: gives the largest size.

    Returns:
        The document without its byte order mark, and whether it must be parsed strictly, never repaired. It
        must if the word DOCTYPE or another declaration is in a comment or a CDATA section.

    Raises:
        XmlRefused: the document is too large, is not UTF-8, or has a DOCTYPE or another declaration.
    """
    if len(data) > limits.document_bytes:
        raise XmlRefused("too_large", f"{len(data)} bytes: a document has {limits.document_bytes} at most")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise XmlRefused("malformed", f"not UTF-8: byte {error.start} cannot be read") from None
    # UTF-16 of plain text is also valid UTF-8, in which every other character is NUL.
    if b"\0" in data:
        raise XmlRefused("malformed", "not UTF-8 text: it holds NUL bytes")
    if data.startswith(b"\xef\xbb\xbf"):
        data, text = data[3:], text[1:]
    declared = _XML_DECLARATION.match(data)
    if declared and declared[1].lower() not in _ENCODINGS:
        raise XmlRefused("malformed", f"declared as {quoted(declared[1].decode())}: only UTF-8 is taken")
    if b"<!" not in data or not _DECLARATION.search(data):
        return data, False
    _check_declarations(text)
    return data, True


def tidied(root: Any, data: bytes, limits: XmlLimits) -> tuple[str, ...]:
    """Check the limits of a parsed document, and remove its comments, processing instructions and schema hints.

    Schema hints are attributes that say where to fetch a schema.

    Args:
        root: the lxml tree, which is changed.
        data: the well-formed bytes that the tree was parsed from.
        limits: the limits for depth, attributes and namespaces.

    Returns:
        One note for each kind of part that was removed; empty when nothing was.

    Raises:
        XmlRefused: a limit is exceeded, or a namespace has an ampersand.
    """
    if data.count(b"<") > limits.depth and _deeper_than(limits.depth)(root):
        raise XmlRefused("too_large", f"nested deeper than {limits.depth} elements")
    if data.count(b"=") > limits.attributes:
        _check_attributes(data, limits)
    if len(data) > _SMALL_BYTES:
        _check_namespaces(data, limits)
    if b"&" in data and _REFERENCE_IN_NAMESPACE.search(data):
        _check_references(data)
    notes = []
    if b"<!--" in data or data.find(b"<?", 1) > 0:
        for kind, name in ((etree.Comment, "comments"), (etree.PI, "processing instructions")):
            if count := sum(1 for _ in root.iter(kind)):
                etree.strip_tags(root, kind)
                notes.append(f"left out: {name} ({count})")
    # A validator would follow schema hints, and the sender must not choose a type by `xsi:type`.
    if b"chemaLocation" in data or b":type" in data:
        notes += _without_hints(root)
    return tuple(notes)


def _check_declarations(text: str) -> None:
    """Raise XmlRefused for a declaration outside of comments, CDATA sections and processing instructions."""
    pieces = tokens(text)
    for piece in pieces:
        # A well-formed document has no stray `<`. The tokens report that of a declaration as stray.
        if piece.kind is Kind.STRAY:
            behind = next(pieces, piece)
            raise _doctype() if _DECLARATION.match(f"<{behind.text[:80]}".encode()) else _unrepaired()


def _parser(*, recover: bool = False) -> Any:
    """Return this thread's own parser. Threads that share a parser wait for one another."""
    name = "recovering" if recover else "strict"
    parser = getattr(_LOCAL, name, None)
    if parser is None:
        parser = new_parser(recover=recover)
        setattr(_LOCAL, name, parser)
    return parser


def _repaired(document: Mended, limits: XmlLimits) -> Repaired:
    """Parse a mended document; let libxml2 recover what is still wrong, and prove that no part was lost."""
    data = document.text.encode()
    # Mending must not create a declaration, which was refused before.
    if _DECLARATION.search(data):
        raise _doctype()
    if len(data) > 2 * limits.document_bytes:
        raise XmlRefused("too_large", "the mended document is over the limit")
    notes = document.notes
    try:
        root = etree.fromstring(data, _parser())
    except etree.XMLSyntaxError as error:
        if _is_beyond(error):
            raise _refused(error, False) from None
        parser = _parser(recover=True)
        root = etree.fromstring(data, parser)
        notes += proven_notes(document, root, parser.error_log)
    return Repaired(root, notes + tidied(root, data, limits))


def _is_beyond(error: Any) -> bool:
    return bool(error.code == etree.ErrorTypes.ERR_RESOURCE_LIMIT)


def _refused(error: Any, is_strict: bool) -> XmlRefused:
    if _is_beyond(error):
        return XmlRefused("too_large", "nested deeper than any document of ours")
    if is_strict:
        return _unrepaired()
    return XmlRefused("malformed", quoted(error.msg or "no XML"))


def _unrepaired() -> XmlRefused:
    return XmlRefused("malformed", "it names a DOCTYPE and is not well-formed, so it is not repaired")


def _doctype() -> XmlRefused:
    return XmlRefused("malformed", "a DOCTYPE or another declaration: no document may have one; leave it out")


def _deeper_than(depth: int) -> Any:
    """Return this thread's compiled XPath for a depth; an XPath object serves one thread at a time."""
    known = _LOCAL.__dict__.setdefault("depths", {})
    if depth not in known:
        known[depth] = etree.XPath(f"boolean({'/*' * (depth + 1)})")
    return known[depth]


def _check_attributes(data: bytes, limits: XmlLimits) -> None:
    # This first check is cheap and may be wrong: a text may contain many equal signs.
    if all(piece.count(b"=") <= limits.attributes for piece in data.split(b"<")):
        return
    for token in tokens(data.decode()):
        if token.kind in (Kind.START, Kind.EMPTY) and len(_VALUE(token.text)) > limits.attributes:
            raise XmlRefused(
                "too_large", f"<{quoted(token.name)}> has more than {limits.attributes} attributes"
            )


def _check_namespaces(data: bytes, limits: XmlLimits) -> None:
    pattern = rb"xmlns[^\s=<>]*+\s*+=\s*+(?:\"[^\"]{%d}|'[^']{%d})" % ((limits.namespace_bytes + 1,) * 2)
    if re.search(pattern, data):
        raise XmlRefused("too_large", f"a namespace is longer than {limits.namespace_bytes} bytes")


def _check_references(data: bytes) -> None:
    """Raise XmlRefused for a namespace with an ampersand.

    libxml2 writes a namespace as it is, so the canonical form would mean something else.
    """
    for token in tokens(data.decode()):
        if token.kind in (Kind.START, Kind.EMPTY):
            for value in re.findall(r"""xmlns[^\s=]*+\s*+=\s*+("[^"]*+"|'[^']*+')""", token.text):
                if "&" in html.unescape(value):
                    raise XmlRefused("malformed", "a namespace with an ampersand has no canonical form")


def _without_hints(root: Any) -> list[str]:
    names = set()
    for element in root.iter(etree.Element):
        for name in element.keys():  # noqa: SIM118  iterating over an element yields its children
            # xsi:nil stays, so that the schema refuses it. Without it a null would be read as an empty value.
            if name.startswith(_INSTANCE) and name != f"{_INSTANCE}nil":
                del element.attrib[name]
                names.add(name.removeprefix(_INSTANCE))
    return [f"left out: the attribute xsi:{quoted(name)}" for name in sorted(names)]
