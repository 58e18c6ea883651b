"""The documents that the pipeline is shown, each with what must come of it.

`ACCEPTED`: taken as it is. `NOTED`: taken, and what was mended or left out is told. `HUH`: the sender is told
what would have been right. `REFUSED`: dropped (XP-03). `says` must stand in the notes or in the reason;
`value` is the expression that the listener gets.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.connectors.doors.xml_pump.pump_payloads import GOOD, HEAD, SPACE, THREAD, calculate, enveloped


class Outcome(Enum):
    """The outcome of a document."""

    ACCEPTED = "accepted"
    NOTED = "accepted with a note"
    HUH = "huh"
    REFUSED = "refused"


ACCEPTED, NOTED, HUH, REFUSED = Outcome


@dataclass(frozen=True)
class Case:
    """A document and its outcome."""

    name: str
    outcome: Outcome
    document: bytes
    says: str = ""
    value: str = "1 + 2"


def cases(outcome: Outcome, *rows: tuple[Any, ...]) -> list[Case]:
    """Cases with one outcome: name, document as text or bytes, and the fields of `Case` that follow."""
    return [
        Case(name, outcome, document.encode() if isinstance(document, str) else document, *more)
        for name, document, *more in rows
    ]


def holding(text: str, before: str = "", after: str = "") -> str:
    """A document whose expression is this, as it stands."""
    return enveloped(calculate(f"{before}<expression>{text}</expression>{after}"))


DOCTYPE = '<!DOCTYPE message [<!ENTITY x "y">]>'
XSI = 'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
LAUGHS = (
    '<!DOCTYPE m [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {x} "{f"&{y};" * 10}">' for y, x in zip("abcdefgh", "bcdefghi", strict=True))
    + "]>"
)
QUADRATIC = '<!DOCTYPE m [<!ENTITY a "' + "x" * 50_000 + '">]>' + holding("&a;" * 1000)
XINCLUDE = '<xi:include xmlns:xi="http://www.w3.org/2001/XInclude" href="CANARY" parse="text"/>'
# The name of the file is put in by the test, which looks for its content in all that comes back.
CANARY = "CANARY"

ACCEPTED_DOCUMENTS = cases(
    ACCEPTED,
    ("plain", GOOD),
    ("no addressee", enveloped(calculate(), "")),
    ("thread in upper case", enveloped(calculate(), f"<thread>{THREAD.upper()}</thread>")),
    ("XML declaration", '<?xml version="1.0" encoding="UTF-8"?>\n' + GOOD),
    ("declared as ASCII", "<?xml version='1.0' encoding='us-ascii'?>" + GOOD),
    ("byte order mark", codecs.BOM_UTF8 + GOOD.encode()),
    ("white space between the elements", GOOD.replace("><", ">\n  <")),
    (
        "other prefixes",
        f'<e:message xmlns:e="urn:trunkline:envelope:1" xmlns:p="{SPACE}"><e:to>c</e:to>'
        "<p:calculate><p:expression>1 + 2</p:expression></p:calculate></e:message>",
    ),
    (
        "a prefix that means the envelope outside and the payload inside",
        f'<x:message xmlns:x="urn:trunkline:envelope:1"><x:calculate xmlns:x="{SPACE}">'
        "<x:expression>1 + 2</x:expression></x:calculate></x:message>",
    ),
    ("single quotes", GOOD.replace('"', "'")),
    ("CDATA", holding("<![CDATA[1 < 2 && 3]]>"), "", "1 < 2 && 3"),
    (
        "a DOCTYPE that is text of a CDATA section",
        holding("<![CDATA[<!DOCTYPE html>]]>"),
        "",
        "<!DOCTYPE html>",
    ),
    ("a DOCTYPE that is escaped text", holding("&lt;!DOCTYPE html>"), "", "<!DOCTYPE html>"),
    ("character references", holding("1 &#43; &#x32;")),
    ("other scripts and emoji", holding("数 Ω مرحبا 🜁"), "", "数 Ω مرحبا 🜁"),
    ("an empty text", enveloped(calculate("<expression/>")), "", ""),
    ("a carriage return by reference", holding("a&#13;b"), "", "a\rb"),
    ("curly quotes in a text", holding("“1 + 2”"), "", "“1 + 2”"),
    ("all fields", holding("1 + 2", after="<digits> +07 </digits><tag>a</tag><tag>b</tag>")),
    (
        "a schema's attribute that only looks like a hint",
        holding("xsi:schemaLocation"),
        "",
        "xsi:schemaLocation",
    ),
    ("a namespace that is declared and not used", GOOD.replace("<to>", '<to xmlns:q="urn:q">')),
    ("64 deep in a text is one", holding("&lt;a>" * 1000), "", "<a>" * 1000),
    ("white space before the XML declaration", f'\n<?xml version="1.0"?>{GOOD}'),
    ("a DOCTYPE in a comment", f"<!-- {DOCTYPE} -->{GOOD}"),
)
NOTED_DOCUMENTS = cases(
    NOTED,
    ("all heads", enveloped(calculate(), f"<from>ann</from><to>c</to><thread>{THREAD}</thread>"), "is ignored"),
    ("code fence", f"```xml\n{GOOD}\n```", "characters before the XML"),
    ("prose around it", f"Sure! Here you are:\n\n{GOOD}\n\nDoes that help?", "characters after the XML"),
    ("a thought before it", f"<think>I should <b>ask</b>, 1 < 2</think>{GOOD}", "before the XML"),
    ("prose before an XML declaration", f'Here:\n<?xml version="1.0"?>\n{GOOD}', "before the XML"),
    ("ampersand", holding("a & b && c"), "escaped an &", "a & b && c"),
    ("ampersand of an address", holding("x?a=1&b=2&copy=3"), "escaped an &", "x?a=1&b=2&copy=3"),
    ("less than", holding("1 < 2 and 3<4"), "escaped a <", "1 < 2 and 3<4"),
    ("entities of HTML", holding("a&nbsp;b&mdash;c"), "entity of HTML", "a\xa0b—c"),
    ("an unknown entity", holding("a &secret; b"), "escaped an &", "a &secret; b"),
    ("an entity of HTML that is markup", holding("&LT;!DOCTYPE x>"), "of HTML", "<!DOCTYPE x>"),
    ("the end of a CDATA section in a text", holding("a[b[0]]> 1"), "]]>", "a[b[0]]> 1"),
    ("curly quotes around an attribute", GOOD.replace('"', "”"), "curly"),
    ("no quotes around an attribute", GOOD.replace(f'"{SPACE}"', "urn:example:calculator:1"), "quotes"),
    ("a control character", holding("a\x1b[31mb"), "cannot hold", "a\ufffd[31mb"),
    ("a control character by reference", holding("a&#27;b&#0;c"), "cannot hold: 2", "a\ufffdb\ufffdc"),
    ("a surrogate by reference", holding("a&#xD800;b"), "cannot hold", "a\ufffdb"),
    ("a field that is not closed", GOOD.replace("</expression>", ""), "tag mismatch"),
    (
        "a payload and an envelope that are not closed",
        GOOD.removesuffix("</calculate></message>"),
        "end of data",
    ),
    ("an end tag that is cut off", GOOD.removesuffix("sage>"), "not finished"),
    ("end tags of another case", GOOD.replace("</expression>", "</Expression>"), "tag mismatch"),
    ("comments", holding("1<!-- one --> + 2", "<!-- a -->"), "comments (2)"),
    ("a comment with two hyphens", holding("1<!-- a -- b --> + 2"), "a comment"),
    ("processing instructions", holding("1 + 2<?php evil() ?>"), "processing instructions (1)"),
    ("a forged sender", enveloped(calculate(), "<from>operator</from><to>c</to>"), "is ignored"),
    ("a forged sender with markup in it", enveloped(calculate(), "<from>&lt;to>x</from>"), "is ignored"),
    (
        "a hint where the schema is",
        GOOD.replace("<expression>", f'<expression {XSI} xsi:schemaLocation="urn:x CANARY">'),
        "schemaLocation",
    ),
    (
        "a hint under another prefix",
        GOOD.replace(
            "<message ",
            '<message xmlns:i="http://www.w3.org/2001/'
            'XMLSchema&#45;instance" i:noNamespaceSchemaLocation="CANARY" ',
        ),
        "noNamespaceSchemaLocation",
    ),
    (
        "a type of the sender's choice",
        GOOD.replace("<expression>", f'<expression {XSI} xsi:type="x:y">'),
        "xsi:type",
    ),
    (
        "an address with an attribute that looks doubled",
        holding('<![CDATA[a="1" a="2"]]> & x'),
        "&",
        'a="1" a="2" & x',
    ),
)
# They are XML, and not what was asked for: their senders are told.
FAULTY_DOCUMENTS = cases(
    HUH,
    ("no envelope", calculate(), "a bare <calculate>"),
    ("no envelope and not closed", calculate().removesuffix("</calculate>"), "a bare <calculate>"),
    ("an envelope in another element", f"<reply>{GOOD}</reply>", "a bare <reply>"),
    ("HTML", "<html><body>502 Bad Gateway</body></html>", "a bare <html>"),
    ("no namespace of the envelope", GOOD.replace(HEAD, "<message>"), "has no xmlns"),
    ("another version of the envelope", GOOD.replace("envelope:1", "envelope:2"), "envelope:1"),
    ("the envelope of the peer", '<message xmlns="https://xml-pipeline.org/ns/envelope/v1"/>', "xmlns"),
    ("the envelope in another case", GOOD.replace("message", "Message"), "a bare <Message>"),
    ("no payload", enveloped(""), "no payload"),
    ("text for a payload", enveloped("1 + 2"), "text directly in <message>"),
    ("text beside the payload", enveloped(calculate() + " please"), "text directly in <message>"),
    ("two payloads", enveloped(calculate() * 2), "2 payloads"),
    ("a payload without a namespace of its own", GOOD.replace(f' xmlns="{SPACE}"', ""), "of its own"),
    ("a payload in no namespace", GOOD.replace(SPACE, ""), f'xmlns="{SPACE}"'),
    ("a payload of another namespace", GOOD.replace(SPACE, "urn:example:evil:1"), f'xmlns="{SPACE}"'),
    ("a namespace that is not absolute", GOOD.replace(SPACE, "calculator"), "not an absolute URI"),
    ("a namespace that is no URI", enveloped('<a xmlns="urn:a b"/>'), "not an absolute URI"),
    ("two addressees", enveloped(calculate(), "<to>a</to><to>b</to>"), "<to> occurs twice"),
    ("an empty addressee", enveloped(calculate(), "<to/>"), "<to> is empty"),
    (
        "an addressee that is no name",
        enveloped(calculate(), "<to>../../etc</to>"),
        "not the name of a listener",
    ),
    ("an addressee that is not closed", GOOD.replace("</to>", ""), "not closed"),
    (
        "an addressee that was split by a comment into a name and a way out",
        enveloped(calculate(), "<to>calc<!-- -->/../root</to>"),
        "not the name of a listener",
    ),
    ("a thread that is no UUID", enveloped(calculate(), "<thread>root</thread>"), "<thread> is not a UUID"),
    (
        "heads in another order",
        enveloped(calculate(), f"<thread>{'0' * 8}-0000-0000-0000-{'0' * 12}</thread><to>a</to>"),
        "the order is to, thread, payload",
    ),
    ("heads behind the payload", enveloped(calculate() + "<to>a</to>", ""), "the order is to, payload"),
    ("an unknown head", enveloped(calculate(), "<priority>high</priority>"), "2 payloads"),
    ("an attribute of the envelope", GOOD.replace("<message ", '<message to="x" '), "takes no attributes"),
    ("another root tag", enveloped('<shutdown xmlns="urn:x:1"/>'), "<calculate xmlns="),
    ("a root tag that is no name", enveloped('<_é xmlns="urn:x:1"/>'), "is not a name"),
    ("a field that is missing", enveloped(calculate("<digits>1</digits>")), "Expected is ( expression )"),
    ("a field that is not known", holding("1", after="<precision>1</precision>"), "'precision'"),
    ("fields in another order", holding("1", before="<digits>1</digits>"), "'digits'"),
    ("a word for a number", holding("1", after="<digits>three</digits>"), "xs:integer"),
    ("a number in other digits", holding("1", after="<digits>٣</digits>"), "xs:integer"),
    ("a number that no int takes", holding("1", after=f"<digits>{'9' * 5000}</digits>"), "an integer"),
    ("an attribute of a field", GOOD.replace("<expression>", '<expression lang="en">'), "not allowed"),
    ("an element in a text", holding("<b>1</b> + 2"), "Element content is not allowed"),
    ("text between the fields", enveloped(calculate("so: <expression>1</expression>")), "element-only"),
    ("nil", GOOD.replace("<expression>", f'<expression {XSI} xsi:nil="true">'), "nil"),
    (
        "nil beside a hint",
        GOOD.replace("<expression>", f'<expression {XSI} xsi:schemaLocation="urn:x x" xsi:nil="true">'),
        "nil",
    ),
    ("a message in no namespace for a payload", enveloped('<message xmlns=""/>'), "without a namespace"),
    ("XInclude for a payload", enveloped(XINCLUDE), "<calculate xmlns="),
    ("XInclude in a payload", enveloped(calculate(XINCLUDE)), "not expected"),
    (
        "a privileged command on the main way",
        enveloped('<hot-reload xmlns="urn:trunkline:command:1"/>'),
        "<calculate xmlns=",
    ),
    ("a message in a message", enveloped(GOOD), "no namespace of its own"),
)
# No XML, too large, or made to do harm (XP-03).
REFUSED_DOCUMENTS = cases(
    REFUSED,
    ("nothing", b"", "no XML"),
    ("white space", b" \n\t", "no XML"),
    ("prose", "I am sorry, I cannot do that.", "no XML"),
    ("JSON", '{"to": "calculator", "expression": "1 < 2"}', "no XML"),
    ("random bytes", bytes(range(256)), "not UTF-8"),
    ("DOCTYPE", DOCTYPE + GOOD, "DOCTYPE"),
    ("DOCTYPE in lower case", "<!doctype html>" + GOOD, "DOCTYPE"),
    ("DOCTYPE in mixed case, with a space", "<! DocType html>" + GOOD, "DOCTYPE"),
    ("DOCTYPE behind a comment", "<!-- a -->" + DOCTYPE + GOOD, "DOCTYPE"),
    ("DOCTYPE behind a processing instruction", "<?a b?>\n" + DOCTYPE + GOOD, "DOCTYPE"),
    ("DOCTYPE behind prose", "Here you are: " + DOCTYPE + GOOD, "DOCTYPE"),
    ("DOCTYPE behind a mark of byte order", codecs.BOM_UTF8 + (DOCTYPE + GOOD).encode(), "DOCTYPE"),
    ("DOCTYPE in the payload", holding(DOCTYPE), "DOCTYPE"),
    ("DOCTYPE behind the envelope", GOOD + DOCTYPE, "DOCTYPE"),
    ("DOCTYPE that a broken comment may hide", "<!-- -- >" + DOCTYPE + "-->" + GOOD, "not repaired"),
    ("DOCTYPE that an attribute may hide", f'<a b="<![CDATA["/>{DOCTYPE}<c d="]]>"/>', "not repaired"),
    (
        "DOCTYPE in a CDATA section of a broken document",
        holding("<![CDATA[<!DOCTYPE html>]]> & more"),
        "not repaired",
    ),
    ("DOCTYPE in UTF-16", (DOCTYPE + GOOD).encode("utf-16"), "not UTF-8"),
    ("DOCTYPE in UTF-16 without a mark", (DOCTYPE + GOOD).encode("utf-16-le"), "not UTF-8"),
    ("DOCTYPE in UTF-32", (DOCTYPE + GOOD).encode("utf-32-be"), "not UTF-8"),
    (
        "DOCTYPE in UTF-7",
        b'<?xml version="1.0" encoding="UTF-7"?>+ADwAIQ-DOCTYPE a+AD4-' + GOOD.encode(),
        "only UTF-8",
    ),
    ("DOCTYPE in EBCDIC", (DOCTYPE + GOOD).encode("cp500"), "not UTF-8"),
    ("declared as EBCDIC", '<?xml version="1.0" encoding="IBM037"?>' + GOOD, "only UTF-8"),
    ("an entity declared without DOCTYPE", '<!ENTITY x SYSTEM "CANARY">' + holding("&x;"), "DOCTYPE"),
    ("entity bomb", LAUGHS + holding("&i;"), "DOCTYPE"),
    ("quadratic entity bomb", QUADRATIC, "DOCTYPE"),
    ("external entity", '<!DOCTYPE m [<!ENTITY x SYSTEM "CANARY">]>' + holding("&x;"), "DOCTYPE"),
    ("external parameter entity", '<!DOCTYPE m [<!ENTITY % x SYSTEM "CANARY"> %x;]>' + GOOD, "DOCTYPE"),
    ("external DTD", '<!DOCTYPE m SYSTEM "CANARY">' + GOOD, "DOCTYPE"),
    ("100,000 deep", "<a>" * 100_000 + "</a>" * 100_000, "deep"),
    ("100,000 deep and not closed", enveloped(calculate("<a>" * 100_000)), "deep"),
    ("100,000 deep behind prose", "Here & there: " + HEAD + "<a>" * 100_000, "pieces"),
    ("65 deep", enveloped(calculate("<a>" * 63 + "</a>" * 63)), "deeper than 64"),
    ("50 MB of text", holding("x" * 50_000_000), "bytes"),
    ("50,000 attributes", enveloped("<a " + " ".join(f"a{n}='1'" for n in range(50_000)) + "/>"), "attrib"),
    (
        "20,000 namespaces",
        enveloped("<a " + " ".join(f"xmlns:a{n}='urn:{n}'" for n in range(20_000)) + "/>"),
        "attributes",
    ),
    (
        "a long namespace at many elements",
        enveloped(f'<a xmlns="urn:x" xmlns:p="urn:{"x" * 50_000}">' + "<p:b/>" * 20_000 + "</a>"),
        "namespace",
    ),
    (
        "a small document that is large in canonical form",
        enveloped(
            '<a xmlns="urn:x" xmlns:p="urn:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx">' + "<p:b/>" * 100_000 + "</a>"
        ),
        "canonical",
    ),
    (
        "a namespace whose canonical form would be another",
        enveloped('<a xmlns="urn:e&#38;#x4A;"/>'),
        "has no canonical form",
    ),
    (
        "a namespace with an ampersand, mended",
        enveloped('<a xmlns="urn:e?a=1&b=2">&</a>'),
        "has no canonical form",
    ),
    ("a namespace with a brace", enveloped('<a xmlns="}urn:x"/>'), "is not a valid URI"),
    ("an attribute without a value", GOOD.replace("<to>", "<to now>"), "cannot be read"),
    ("an attribute twice", GOOD.replace("<to>", '<to a="1" a="2">'), "twice"),
    (
        "an attribute twice by two prefixes",
        GOOD.replace("<to>", '<to xmlns:a="urn:a" xmlns:b="urn:a" a:x="1" b:x="2">'),
        "namespace",
    ),
    ("a prefix that is not declared", GOOD.replace("calculate", "c:calculate"), "prefix c"),
    ("the prefix xml for another namespace", GOOD.replace("<to>", '<to xmlns:xml="urn:x">'), "namespace"),
    ("NUL", holding("a\0b"), "NUL"),
    ("invalid UTF-8", holding("é").encode("latin-1"), "not UTF-8"),
    ("overlong UTF-8", GOOD.encode().replace(b"<to>", b"\xc0\xbcto>"), "not UTF-8"),
    ("a surrogate in UTF-8", holding("x").encode().replace(b"x<", b"\xed\xa0\x80<"), "not UTF-8"),
    ("two documents", GOOD + GOOD, "more than one element"),
    ("two documents with prose between them", f"First:\n{GOOD}\nthen:\n{GOOD}", "more than one"),
    ("a document in a comment", f"<!-- {GOOD} -->", "no XML"),
    ("a comment that is not closed", GOOD.replace("<to>", "<!-- <to>"), "not closed"),
    ("a CDATA section that is not closed", holding("<![CDATA[1 + 2"), "not closed"),
    ("cut off in a value", HEAD + f'<calculate xmlns="{SPACE}"><expression>12', "cut off"),
    ("cut off in a start tag", HEAD + f'<calculate xmlns="{SPACE}"><expr', "cut off"),
    ("an end tag too many, with text behind it", holding("1</b> + 2", after="</calculate> + 3"), "lose"),
    ("too many characters < to be XML", holding("< " * 5000), "begin no tag"),
)
CORPUS = [*ACCEPTED_DOCUMENTS, *NOTED_DOCUMENTS, *FAULTY_DOCUMENTS, *REFUSED_DOCUMENTS]
