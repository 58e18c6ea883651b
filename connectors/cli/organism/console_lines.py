"""Lines of `trunkline console`: typed lines become XML documents, and received XML becomes safe text (CM-06).

@calculator <calculate><expression>1+2</expression></calculate>    to that listener
<calculate><expression>1+2</expression></calculate>                to all that take the tag
calculate expression=1+2 digits=3                                  the same, made into XML
say soup is ready                                                  text as the content
#3 <answer>yes</answer>                                            to the sender of message 3, on its thread
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from connectors.plumbing.xml_wire.documents import XmlRefused
from connectors.plumbing.xml_wire.envelope import ENVELOPE_NAMESPACE
from connectors.plumbing.xml_wire.safe_xml import repair
from trunkline_agent.errors import UsageError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import is_name

_MARGIN: Final = "    "
_DECLARATION: Final = re.compile(r"^\s*<\?xml\b[^>]*\?>\s*")
_START_TAG: Final = re.compile(r"<([A-Za-z_][\w.-]*)((?:\s[^<>]*?)?)(/?)>")
_TAG: Final = re.compile(r"[A-Za-z_][\w.-]*").fullmatch
_FIELDS: Final = re.compile(r"[A-Za-z_][\w.-]*=").match
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]").search


@dataclass(frozen=True)
class Known:
    """The facts that are needed to turn a typed line into a document.

    Attributes:
        namespace_of_tag: The XML namespace of payloads, by root tag.
        namespace_of_listener: The XML namespace of the payloads that a listener takes, by its name.
        shown: Sender and thread of each message that the console has shown, by its number.
    """

    namespace_of_tag: Mapping[str, str]
    namespace_of_listener: Mapping[str, str]
    shown: Mapping[int, tuple[str, str]]


def document_of(line: str, known: Known) -> bytes:
    """Turn a typed line into the XML document to send: an envelope with recipient, thread and payload.

    `line` must not be blank. It has one of the forms that the console's `/help` shows. Missing namespaces are
    added from `known`. Raises UsageError, whose text shows the right form, if the line cannot be understood.
    """
    to = thread = None
    rest = line.strip()
    if rest[0] in "@#":
        head, _, rest = rest.partition(" ")
        rest = rest.strip()
        if not rest:
            raise UsageError(f"{head}: and what? Write {head} <xml…>, or {head} tag name=value")
        if head[0] == "@":
            to = _name(head[1:])
        else:
            to, thread = _shown(head[1:], known)
    if _NOT_XML(rest):
        raise UsageError("there is a character in it that XML cannot hold")
    rest = _DECLARATION.sub("", rest)
    if to is None and rest.startswith("<") and ENVELOPE_NAMESPACE in rest.partition(">")[0]:
        return rest.encode("utf-8")
    payload = _with_namespace(rest, to, known) if rest.startswith("<") else _from_words(rest, to, known)
    parts = [] if to is None else [f"<to>{escape(to)}</to>"]
    parts += [] if thread is None else [f"<thread>{escape(thread)}</thread>"]
    return f'<message xmlns="{ENVELOPE_NAMESPACE}">{"".join(parts)}{payload}</message>'.encode()


def _name(text: str) -> str:
    if not is_name(text):
        raise UsageError(f"@{text}: this is no name of a listener; /listeners shows them")
    return text


def _shown(number: str, known: Known) -> tuple[str, str]:
    found = known.shown.get(int(number)) if number.isascii() and number.isdigit() and len(number) < 10 else None
    if found is None:
        raise UsageError(f"#{number}: there is no message of this number")
    return found


def _with_namespace(payload: str, to: str | None, known: Known) -> str:
    """Return the payload. If its root tag declares no namespace, add the one that listeners expect."""
    start = _START_TAG.match(payload)
    if start is None or "xmlns" in start[2]:
        return payload
    # Declared even if it is empty, because the payload would inherit the envelope's namespace.
    declared = f"<{start[1]} xmlns={quoteattr(_namespace(start[1], to, known))}{start[2]}{start[3]}>"
    return declared + payload[start.end() :]


def _from_words(text: str, to: str | None, known: Known) -> str:
    tag, _, rest = text.partition(" ")
    if _TAG(tag) is None:
        raise UsageError(f"{tag}: that is no tag. Write <xml…>, or tag name=value; /help tells more")
    if _FIELDS(rest.strip()) is None:
        content = escape(rest.strip())
    else:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise UsageError(f"{rest}: {error}; quote as in a shell") from None
        content = "".join(_field(word) for word in words)
    return f"<{tag} xmlns={quoteattr(_namespace(tag, to, known))}>{content}</{tag}>"


def _field(word: str) -> str:
    name, equals, value = word.partition("=")
    if not equals or _TAG(name) is None:
        raise UsageError(f"{word}: write name=value, with quotes around a value that has spaces")
    return f"<{name}>{escape(value)}</{name}>"


def _namespace(tag: str, to: str | None, known: Known) -> str:
    if to is not None and to in known.namespace_of_listener and tag not in known.namespace_of_tag:
        return known.namespace_of_listener[to]
    return known.namespace_of_tag.get(tag, "")


def shown_xml(text: str) -> str:
    """Return the XML `text` as indented and escaped lines for a terminal.

    Each line begins with spaces, so that no line can look like one of the console's own. Text that is no XML is
    shown in the same way.
    """
    from lxml import etree  # type: ignore[import-untyped]

    try:
        root = repair(text.encode("utf-8", "replace")).root
    except XmlRefused:
        lines = text.split("\n")
    else:
        etree.indent(root)
        lines = etree.tostring(root, encoding="unicode").split("\n")
    return "\n".join(_MARGIN + escaped(line) for line in lines)
