"""A tokenizer that finds tags, texts and comments in XML text, for checks before a parser may see it.

In a well-formed document a `<` is only at the start of markup, so reading from left to right is exact. In other
documents it is a guess, and the result is proven afterwards (`mending`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

from connectors.plumbing.xml_wire.faults import XmlRefused

STRAY_LIMIT: Final = 1000
PIECES_LIMIT: Final = 50_000


class Kind(Enum):
    """The kind of a piece of XML text. `STRAY`: a `<` that begins no tag.

    `UNCLOSED`: a comment without an end.
    """

    TEXT = "text"
    START = "start tag"
    EMPTY = "empty tag"
    END = "end tag"
    CDATA = "CDATA section"
    COMMENT = "comment"
    INSTRUCTION = "processing instruction"
    STRAY = "a < that begins nothing"
    UNCLOSED = "markup that is not closed"


class Token(NamedTuple):
    """A piece of an XML document, of one kind.

    `text` is the content of a CDATA section, and the whole piece for other kinds. `name` is the tag's name,
    empty for pieces that are no tags.
    """

    kind: Kind
    text: str
    name: str = ""


# Possessive, so that each character is read once, whatever the input is.
_TAG: Final = re.compile(r"""</?+([^\W\d][\w.:-]*+)(?:[^<>"']++|"[^"<]*+"|'[^'<]*+')*+>""")
_SECTIONS: Final = (
    ("<![CDATA[", "]]>", Kind.CDATA),
    ("<!--", "-->", Kind.COMMENT),
    ("<?", "?>", Kind.INSTRUCTION),
)


def broken_pieces(text: str) -> list[Token]:
    """Split a text that is not well-formed XML into tags, texts, comments and the like, in order.

    The limits on their number bound the work of the repair. Raises XmlRefused for more than 50,000 pieces, or
    for more than 1,000 characters `<` that begin no tag.
    """
    pieces: list[Token] = []
    strays = 0
    for token in tokens(text):
        pieces.append(token)
        strays += token.kind is Kind.STRAY
        if strays > STRAY_LIMIT:
            raise XmlRefused("malformed", f"more than {STRAY_LIMIT} characters < that begin no tag")
        if len(pieces) > PIECES_LIMIT:
            raise XmlRefused(
                "malformed", f"not well-formed, and of more than {PIECES_LIMIT} pieces: not repaired"
            )
    return pieces


def tokens(text: str) -> Iterator[Token]:
    """Split XML text into tags, texts, comments and the like, and yield the pieces in order, in linear time.

    Together the pieces cover the whole text. Nothing is raised: a comment, CDATA section or processing
    instruction without an end is the last piece, of the kind `UNCLOSED`.
    """
    here = 0
    while here < len(text):
        mark = text.find("<", here)
        if mark < 0:
            yield Token(Kind.TEXT, text[here:])
            return
        if mark > here:
            yield Token(Kind.TEXT, text[here:mark])
        for opening, closing, kind in _SECTIONS:
            if text.startswith(opening, mark):
                end = text.find(closing, mark + len(opening))
                if end < 0:
                    yield Token(Kind.UNCLOSED, text[mark:])
                    return
                inner = text[mark + len(opening) : end]
                here = end + len(closing)
                yield Token(kind, inner if kind is Kind.CDATA else text[mark:here])
                break
        else:
            token = _tag(text, mark)
            here = mark + len(token.text)
            yield token


def _tag(text: str, mark: int) -> Token:
    found = _TAG.match(text, mark)
    if found is None:
        return Token(Kind.STRAY, "<")
    tag = found[0]
    kind = Kind.END if tag[1] == "/" else Kind.EMPTY if tag[-2] == "/" else Kind.START
    return Token(kind, tag, found[1])
