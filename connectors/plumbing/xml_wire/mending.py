"""Mend the XML that language models and people write, and prove that no part of it was lost (XP-02).

libxml2's recovery drops text, entities, attributes and everything after the first element, and reports little
of it. So this module mends the text itself, with a note for each change: prose and code fences around the
document, ampersands, stray `<`, entities of HTML, curly quotes, control characters. libxml2 only has to recover
where elements end. The tags, attributes and text of its tree must be those of the source, in the same order;
any other change is refused.
"""

from __future__ import annotations

import html.entities
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final
from xml.sax.saxutils import escape

from lxml import etree  # type: ignore[import-untyped]

from connectors.plumbing.xml_wire.documents import Kind, Token, XmlRefused, broken_pieces, quoted

NOTES_LIMIT: Final = 20
NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""A character that XML cannot hold, not even escaped."""
REPLACEMENT: Final = "\ufffd"

_REFERENCE: Final = re.compile(r"&(?:#(\d{1,8});|#[xX]([0-9a-fA-F]{1,6});|([A-Za-z][A-Za-z0-9]{0,31};))?")
_ATTRIBUTE: Final = re.compile(r"""\s++([^\W\d][\w.:-]*+)\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s"'=<>/]++))""")
_CURLY: Final = re.compile('=\\s*[“”„‟][^“”„‟"]*[“”„‟]')
_PREDEFINED: Final = {"amp;": "&", "lt;": "<", "gt;": ">", "quot;": '"', "apos;": "'"}
_LINE_ENDS: Final = re.compile("\r\n?")
_WHITE: Final = " \t\r\n"


@dataclass
class Mended:
    """The result of a repair: the repaired text, and the parts that libxml2's tree of it must contain.

    Attributes:
        text: the repaired document.
        notes: one text for each kind of change.
        names: the tags of all elements, in order.
        attributes: the number of attributes.
        content: the texts between tags, in order.
        counts: how often each change was made.
    """

    text: str = ""
    notes: tuple[str, ...] = ()
    names: list[str] = field(default_factory=list)
    attributes: int = 0
    content: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def mended(text: str, root_tag: str | None) -> Mended:
    """Repair the text of a document that is not well-formed XML, and return it with notes of the changes.

    The result may still have wrongly nested tags. libxml2 recovers from these, and `proven_notes` checks what
    it did.

    Args:
        text: the source, perhaps with prose around the XML.
        root_tag: the document is the text from the first tag of this name to the last. If there is none, it is
            the first element to the last tag of the same name. None: it is the whole text, as the content of
            `<answer>`.

    Raises:
        XmlRefused: the text cannot be repaired without losing a part of it.
    """
    pieces = broken_pieces(text)
    if pieces and pieces[-1].kind is Kind.UNCLOSED:
        raise XmlRefused("malformed", "a comment, CDATA section or processing instruction is not closed")
    result = Mended()
    if root_tag is None:
        pieces = [Token(Kind.START, "<answer>", "answer"), *pieces, Token(Kind.END, "</answer>", "answer")]
    else:
        pieces = _cut_out(pieces, root_tag, result)
    _check_end(pieces, result)
    result.text = "".join(_mended_piece(piece, result) for piece in pieces)
    notes = [f"{what}: {count}" if count > 1 else what for what, count in result.counts.items()]
    result.notes = tuple(notes[:NOTES_LIMIT])
    return result


def proven_notes(document: Mended, root: Any, errors: Any) -> tuple[str, ...]:
    """Check that libxml2's recovery of a repaired document lost no part of it, and return its changes as notes.

    An empty tuple means that libxml2 changed nothing.

    Args:
        document: the repaired document, from `mended`.
        root: the tree that libxml2 made of it, None if it made none.
        errors: libxml2's list of errors, the parser's `error_log`.

    Raises:
        XmlRefused: the recovery changed more than where elements end, or reported nesting beyond its limit.
    """
    if root is None:
        raise XmlRefused("malformed", "no XML in it")
    for error in errors:
        if error.type == etree.ErrorTypes.ERR_RESOURCE_LIMIT:
            raise XmlRefused("too_large", "nested deeper than any document of ours")
        # lxml writes names as {namespace}name, so it cannot name an element whose namespace has a brace.
        has_brace = error.type == etree.ErrorTypes.WAR_NS_URI and re.search("[{}]", error.message)
        if has_brace or error.type_name.startswith("NS_ERR"):
            raise XmlRefused("malformed", f"a namespace is wrong: {quoted(error.message)}")
    elements = list(root.iter(etree.Element))
    if [_source_name(element) for element in elements] != document.names:
        raise XmlRefused("malformed", "more than one element at the top, or a tag that cannot be read")
    if sum(len(element.attrib) for element in elements) != document.attributes:
        raise XmlRefused("malformed", "an attribute cannot be read")
    # Behind the root only white space may be lost. Before the root there is no text.
    kept, source = "".join(root.itertext()), "".join(document.content)
    if not source.startswith(kept) or source[len(kept) :].strip(_WHITE):
        raise XmlRefused("malformed", "tags do not match, and mending them would lose text; close each of them")
    notes = [f"line {error.line}: {quoted(error.message)}" for error in errors]
    more = len(notes) - NOTES_LIMIT
    return tuple(notes[:NOTES_LIMIT]) + ((f"and {more} more like these",) if more > 0 else ())


def _source_name(element: Any) -> str:
    name = etree.QName(element).localname
    return f"{element.prefix}:{name}" if element.prefix else str(name)


def _local(name: str) -> str:
    return name.rpartition(":")[2]


def _cut_out(pieces: list[Token], root_tag: str, result: Mended) -> list[Token]:
    """Return the pieces of the document itself, without the text around it."""
    opening = [i for i, piece in enumerate(pieces) if piece.kind in (Kind.START, Kind.EMPTY)]
    if not opening:
        raise XmlRefused("malformed", "no XML element in it")
    named = [i for i in opening if _local(pieces[i].name) == root_tag] or opening
    begin, tag = named[0], _local(pieces[named[0]].name)
    ends = [i for i in range(begin, len(pieces)) if pieces[i].kind in (Kind.END, Kind.EMPTY)]
    ends = [i for i in ends if _local(pieces[i].name) == tag]
    # Without its end tag the document extends to the end of the text.
    end = ends[-1] + 1 if ends else len(pieces)
    for where, around in (("before", pieces[:begin]), ("after", pieces[end:])):
        left = "".join(piece.text for piece in around if piece.kind is not Kind.INSTRUCTION)
        if size := len(left.strip(_WHITE)):
            result.counts[f"left out: {size} characters {where} the XML"] = 1
    return pieces[begin:end]


def _check_end(pieces: list[Token], result: Mended) -> None:
    """Accept a document whose end is missing if only end tags are missing; else raise XmlRefused.

    A value that is cut may have lost any part of itself. An end tag that is cut itself, `</mess`, is removed.
    """
    if pieces[-1].kind is Kind.TEXT and not pieces[-1].text.strip(_WHITE):
        del pieces[-1]
    if len(pieces) > 1 and pieces[-2].kind is Kind.STRAY and pieces[-1].text.startswith("/"):
        result.counts[f"left out: an end tag that is not finished, <{quoted(pieces[-1].text)}"] = 1
        del pieces[-2:]
    if pieces[-1].kind in (Kind.TEXT, Kind.STRAY, Kind.CDATA):
        raise XmlRefused("malformed", "it is cut off in the middle of a text; send all of it")


def _mended_piece(piece: Token, result: Mended) -> str:
    match piece.kind:
        case Kind.TEXT:
            plain = _plain(piece.text, result)
        case Kind.CDATA:
            plain = _without_controls(_LINE_ENDS.sub("\n", piece.text), result)
        case Kind.STRAY:
            result.counts["escaped a < that begins no tag"] += 1
            plain = "<"
        case Kind.COMMENT | Kind.INSTRUCTION:
            result.counts[f"left out: a {piece.kind.value}"] += 1
            return ""
        case Kind.END:
            return f"</{piece.name}>"
        case _:
            return _mended_tag(piece, result)
    result.content.append(plain)
    return escape(plain, {"\r": "&#13;"})


def _mended_tag(piece: Token, result: Mended) -> str:
    closing = "/>" if piece.kind is Kind.EMPTY else ">"
    rest = piece.text[1 + len(piece.name) : -len(closing)]
    if _CURLY.search(rest):
        rest = _CURLY.sub(lambda found: re.sub("[“”„‟]", '"', found[0]), rest)
        result.counts["straightened curly quotes"] += 1
    here, seen, written = 0, set(), []
    while found := _ATTRIBUTE.match(rest, here):
        here = found.end()
        name, double, single, bare = found.groups()
        if name in seen:
            raise XmlRefused("malformed", f"<{quoted(piece.name)}> has the attribute {quoted(name)} twice")
        seen.add(name)
        if bare is not None:
            result.counts["put quotes around the value of an attribute"] += 1
        value = _plain(next(v for v in (double, single, bare) if v is not None), result)
        value = escape(value, {'"': "&quot;", "\t": " ", "\n": " ", "\r": " "})
        written.append(f' {name}="{value}"')
        result.attributes += not (name == "xmlns" or name.startswith("xmlns:"))
    if rest[here:].strip(_WHITE):
        raise XmlRefused("malformed", f"the attributes of <{quoted(piece.name)}> cannot be read")
    result.names.append(piece.name)
    return f"<{piece.name}{''.join(written)}{closing}"


def _plain(text: str, result: Mended) -> str:
    """Return a text with its references resolved; an ampersand that begins no reference stays as it is."""

    def resolved(found: re.Match[str]) -> str:
        decimal, hexadecimal, name = found.groups()
        if decimal or hexadecimal:
            number = int(decimal) if decimal else int(hexadecimal, 16)
            # A control character is replaced later. A number that is no character becomes NUL here.
            return chr(number) if number < 0xD800 or 0xE000 <= number <= 0x10FFFF else "\0"
        if name in _PREDEFINED:
            return _PREDEFINED[name]
        if name and name in html.entities.html5:
            result.counts["replaced an entity of HTML by its character"] += 1
            return html.entities.html5[name]
        result.counts["escaped an & that begins no reference"] += 1
        return found[0]

    text = _LINE_ENDS.sub("\n", text)
    if "]]>" in text:
        result.counts["escaped a ]]> that ends no CDATA section"] += 1
    if "&" in text:
        text = _REFERENCE.sub(resolved, text)
    return _without_controls(text, result)


def _without_controls(text: str, result: Mended) -> str:
    text, count = NOT_XML.subn(REPLACEMENT, text)
    if count:
        result.counts["replaced a character that XML cannot hold"] += count
    return text
