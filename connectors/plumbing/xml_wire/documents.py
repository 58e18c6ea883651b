"""The limits of an XML document, its two errors (dropped, or answered with a `<huh>`), and its tokens.

The tokenizer finds tags, texts and comments, for checks before a parser may see them. In a well-formed document
a `<` is only at the start of markup, so reading from left to right is exact. In other documents it is a guess,
and the result is proven afterwards (`mending`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

from trunkline_agent.terminal_text import QUOTED_CHARACTERS, quoted

__all__ = ["DEFAULT_LIMITS", "QUOTED_CHARACTERS", "Faulty", "Step", "XmlLimits", "XmlRefused", "quoted"]


@dataclass(frozen=True, slots=True)
class XmlLimits:
    """The limits of an XML document (XP-03). A document over a limit is refused, early, as `too_large`.

    Attributes:
        document_bytes: the size of the document.
        depth: how deep elements may be nested.
        attributes: the number of attributes and namespace declarations of one tag. Canonicalization sorts them
            by insertion, and a hundred thousand cost 18 s.
        namespace_bytes: the size of one namespace. Canonical form repeats it wherever its prefix is used, so a
            long one in many elements would be a bomb without any entity.
        payloads: the number of payloads in one handler's answer.
    """

    document_bytes: int = 1024 * 1024
    depth: int = 64
    attributes: int = 64
    namespace_bytes: int = 256
    payloads: int = 100


DEFAULT_LIMITS = XmlLimits()


Step = Literal["envelope", "payload", "value", "routing"]


class XmlRefused(ValueError):
    """The XML document is refused and must be dropped: its sender gets no `<huh>` (XP-03).

    It has a DOCTYPE, is too large or too deep, is not UTF-8, or is no XML even after repair. `reason` is
    `too_large` for everything beyond a limit and `malformed` for the rest. The error's text says why.
    """

    def __init__(self, reason: Literal["malformed", "too_large"], why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Faulty(ValueError):
    """The document is XML but not as expected. Its sender gets a `<huh>` (XP-02).

    `step` is the step that failed: `envelope`, `payload`, `value` or `routing`. `why` says what was wrong,
    without any value of the input. `expected` shows a correct document, or is empty. `notes` are the notes of
    the document's repair, which may explain the fault.
    """

    def __init__(self, step: Step, why: str, expected: str = "", notes: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.step = step
        self.why = why
        self.expected = expected
        self.notes = notes


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
