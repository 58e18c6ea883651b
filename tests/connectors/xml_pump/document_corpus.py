"""The documents that the pipeline is shown, each with what must come of it.

`ACCEPTED`: taken as it is. `NOTED`: taken, and what was mended or left out is told. `HUH`: the sender is told
what would have been right. `REFUSED`: dropped (XP-03). `says` must stand in the notes or in the reason;
`value` is the expression that the listener gets.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from enum import Enum

from tests.connectors.xml_pump.pump_payloads import GOOD, SPACE, THREAD, calculate, enveloped


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


def case(name: str, outcome: Outcome, document: str | bytes, says: str = "", value: str = "1 + 2") -> Case:
    """A case of text or bytes."""
    return Case(name, outcome, document.encode() if isinstance(document, str) else document, says, value)


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

GOOD_DOCUMENTS = [
    case("plain", ACCEPTED, GOOD),
    case("no addressee", ACCEPTED, enveloped(calculate(), "")),
    case(
        "all heads",
        NOTED,
        enveloped(calculate(), f"<from>ann</from><to>c</to><thread>{THREAD}</thread>"),
        "is ignored",
    ),
    case("thread in upper case", ACCEPTED, enveloped(calculate(), f"<thread>{THREAD.upper()}</thread>")),
    case("XML declaration", ACCEPTED, '<?xml version="1.0" encoding="UTF-8"?>\n' + GOOD),
    case("declared as ASCII", ACCEPTED, "<?xml version='1.0' encoding='us-ascii'?>" + GOOD),
    case("byte order mark", ACCEPTED, codecs.BOM_UTF8 + GOOD.encode()),
    case("white space between the elements", ACCEPTED, GOOD.replace("><", ">\n  <")),
    case(
        "other prefixes",
        ACCEPTED,
        f'<e:message xmlns:e="urn:trunkline:envelope:1" xmlns:p="{SPACE}"><e:to>c</e:to>'
        "<p:calculate><p:expression>1 + 2</p:expression></p:calculate></e:message>",
    ),
    case(
        "a prefix that means the envelope outside and the payload inside",
        ACCEPTED,
        f'<x:message xmlns:x="urn:trunkline:envelope:1"><x:calculate xmlns:x="{SPACE}">'
        "<x:expression>1 + 2</x:expression></x:calculate></x:message>",
    ),
    case("single quotes", ACCEPTED, GOOD.replace('"', "'")),
    case("CDATA", ACCEPTED, holding("<![CDATA[1 < 2 && 3]]>"), value="1 < 2 && 3"),
    case(
        "a DOCTYPE that is text of a CDATA section",
        ACCEPTED,
        holding("<![CDATA[<!DOCTYPE html>]]>"),
        value="<!DOCTYPE html>",
    ),
    case("a DOCTYPE that is escaped text", ACCEPTED, holding("&lt;!DOCTYPE html>"), value="<!DOCTYPE html>"),
    case("character references", ACCEPTED, holding("1 &#43; &#x32;")),
    case("other scripts and emoji", ACCEPTED, holding("数 Ω مرحبا 🜁"), value="数 Ω مرحبا 🜁"),
    case("an empty text", ACCEPTED, enveloped(calculate("<expression/>")), value=""),
    case("a carriage return by reference", ACCEPTED, holding("a&#13;b"), value="a\rb"),
    case("curly quotes in a text", ACCEPTED, holding("“1 + 2”"), value="“1 + 2”"),
    case("all fields", ACCEPTED, holding("1 + 2", after="<digits> +07 </digits><tag>a</tag><tag>b</tag>")),
    case(
        "a schema's attribute that only looks like a hint",
        ACCEPTED,
        holding("xsi:schemaLocation"),
        value="xsi:schemaLocation",
    ),
    case("a namespace that is declared and not used", ACCEPTED, GOOD.replace("<to>", '<to xmlns:q="urn:q">')),
    case("64 deep in a text is one", ACCEPTED, holding("&lt;a>" * 1000), value="<a>" * 1000),
]

REPAIRABLE_DOCUMENTS = [
    case("code fence", NOTED, f"```xml\n{GOOD}\n```", "characters before the XML"),
    case(
        "prose around it",
        NOTED,
        f"Sure! Here you are:\n\n{GOOD}\n\nDoes that help?",
        "characters after the XML",
    ),
    case("a thought before it", NOTED, f"<think>I should <b>ask</b>, 1 < 2</think>{GOOD}", "before the XML"),
    case("prose before an XML declaration", NOTED, f'Here:\n<?xml version="1.0"?>\n{GOOD}', "before the XML"),
    case("white space before the XML declaration", ACCEPTED, f'\n<?xml version="1.0"?>{GOOD}'),
    case("ampersand", NOTED, holding("a & b && c"), "escaped an &", "a & b && c"),
    case("ampersand of an address", NOTED, holding("x?a=1&b=2&copy=3"), "escaped an &", "x?a=1&b=2&copy=3"),
    case("less than", NOTED, holding("1 < 2 and 3<4"), "escaped a <", "1 < 2 and 3<4"),
    case("entities of HTML", NOTED, holding("a&nbsp;b&mdash;c"), "entity of HTML", "a\xa0b—c"),
    case("an unknown entity", NOTED, holding("a &secret; b"), "escaped an &", "a &secret; b"),
    case("an entity of HTML that is markup", NOTED, holding("&LT;!DOCTYPE x>"), "of HTML", "<!DOCTYPE x>"),
    case("the end of a CDATA section in a text", NOTED, holding("a[b[0]]> 1"), "]]>", "a[b[0]]> 1"),
    case("curly quotes around an attribute", NOTED, GOOD.replace('"', "”"), "curly"),
    case(
        "no quotes around an attribute", NOTED, GOOD.replace(f'"{SPACE}"', "urn:example:calculator:1"), "quotes"
    ),
    case("a control character", NOTED, holding("a\x1b[31mb"), "cannot hold", "a\ufffd[31mb"),
    case(
        "a control character by reference", NOTED, holding("a&#27;b&#0;c"), "cannot hold: 2", "a\ufffdb\ufffdc"
    ),
    case("a surrogate by reference", NOTED, holding("a&#xD800;b"), "cannot hold", "a\ufffdb"),
    case("a field that is not closed", NOTED, GOOD.replace("</expression>", ""), "tag mismatch"),
    case(
        "a payload and an envelope that are not closed",
        NOTED,
        GOOD.removesuffix("</calculate></message>"),
        "end of data",
    ),
    case("an end tag that is cut off", NOTED, GOOD.removesuffix("sage>"), "not finished"),
    case("end tags of another case", NOTED, GOOD.replace("</expression>", "</Expression>"), "tag mismatch"),
    case("comments", NOTED, holding("1<!-- one --> + 2", "<!-- a -->"), "comments (2)"),
    case("a comment with two hyphens", NOTED, holding("1<!-- a -- b --> + 2"), "a comment"),
    case("processing instructions", NOTED, holding("1 + 2<?php evil() ?>"), "processing instructions (1)"),
    case("a DOCTYPE in a comment", ACCEPTED, f"<!-- {DOCTYPE} -->{GOOD}"),
    case("a forged sender", NOTED, enveloped(calculate(), "<from>operator</from><to>c</to>"), "is ignored"),
    case(
        "a forged sender with markup in it",
        NOTED,
        enveloped(calculate(), "<from>&lt;to>x</from>"),
        "is ignored",
    ),
    case(
        "a hint where the schema is",
        NOTED,
        GOOD.replace("<expression>", f'<expression {XSI} xsi:schemaLocation="urn:x CANARY">'),
        "schemaLocation",
    ),
    case(
        "a hint under another prefix",
        NOTED,
        GOOD.replace(
            "<message ",
            '<message xmlns:i="http://www.w3.org/2001/'
            'XMLSchema&#45;instance" i:noNamespaceSchemaLocation="CANARY" ',
        ),
        "noNamespaceSchemaLocation",
    ),
    case(
        "a type of the sender's choice",
        NOTED,
        GOOD.replace("<expression>", f'<expression {XSI} xsi:type="x:y">'),
        "xsi:type",
    ),
    case(
        "an address with an attribute that looks doubled",
        NOTED,
        holding('<![CDATA[a="1" a="2"]]> & x'),
        "&",
        'a="1" a="2" & x',
    ),
]
