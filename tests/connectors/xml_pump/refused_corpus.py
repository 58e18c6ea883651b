"""The documents of the corpus that are dropped (XP-03): no XML, too large, or made to do harm."""

from __future__ import annotations

import codecs

from tests.connectors.xml_pump.document_corpus import DOCTYPE, LAUGHS, QUADRATIC, REFUSED, case, holding
from tests.connectors.xml_pump.pump_payloads import GOOD, HEAD, SPACE, calculate, enveloped

REFUSED_DOCUMENTS = [
    case("nothing", REFUSED, b"", "no XML"),
    case("white space", REFUSED, b" \n\t", "no XML"),
    case("prose", REFUSED, "I am sorry, I cannot do that.", "no XML"),
    case("JSON", REFUSED, '{"to": "calculator", "expression": "1 < 2"}', "no XML"),
    case("random bytes", REFUSED, bytes(range(256)), "not UTF-8"),
    case("DOCTYPE", REFUSED, DOCTYPE + GOOD, "DOCTYPE"),
    case("DOCTYPE in lower case", REFUSED, "<!doctype html>" + GOOD, "DOCTYPE"),
    case("DOCTYPE in mixed case, with a space", REFUSED, "<! DocType html>" + GOOD, "DOCTYPE"),
    case("DOCTYPE behind a comment", REFUSED, "<!-- a -->" + DOCTYPE + GOOD, "DOCTYPE"),
    case("DOCTYPE behind a processing instruction", REFUSED, "<?a b?>\n" + DOCTYPE + GOOD, "DOCTYPE"),
    case("DOCTYPE behind prose", REFUSED, "Here you are: " + DOCTYPE + GOOD, "DOCTYPE"),
    case(
        "DOCTYPE behind a mark of byte order", REFUSED, codecs.BOM_UTF8 + (DOCTYPE + GOOD).encode(), "DOCTYPE"
    ),
    case("DOCTYPE in the payload", REFUSED, holding(DOCTYPE), "DOCTYPE"),
    case("DOCTYPE behind the envelope", REFUSED, GOOD + DOCTYPE, "DOCTYPE"),
    case(
        "DOCTYPE that a broken comment may hide", REFUSED, "<!-- -- >" + DOCTYPE + "-->" + GOOD, "not repaired"
    ),
    case(
        "DOCTYPE that an attribute may hide",
        REFUSED,
        f'<a b="<![CDATA["/>{DOCTYPE}<c d="]]>"/>',
        "not repaired",
    ),
    case(
        "DOCTYPE in a CDATA section of a broken document",
        REFUSED,
        holding("<![CDATA[<!DOCTYPE html>]]> & more"),
        "not repaired",
    ),
    case("DOCTYPE in UTF-16", REFUSED, (DOCTYPE + GOOD).encode("utf-16"), "not UTF-8"),
    case("DOCTYPE in UTF-16 without a mark", REFUSED, (DOCTYPE + GOOD).encode("utf-16-le"), "not UTF-8"),
    case("DOCTYPE in UTF-32", REFUSED, (DOCTYPE + GOOD).encode("utf-32-be"), "not UTF-8"),
    case(
        "DOCTYPE in UTF-7",
        REFUSED,
        b'<?xml version="1.0" encoding="UTF-7"?>+ADwAIQ-DOCTYPE a+AD4-' + GOOD.encode(),
        "only UTF-8",
    ),
    case("DOCTYPE in EBCDIC", REFUSED, (DOCTYPE + GOOD).encode("cp500"), "not UTF-8"),
    case("declared as EBCDIC", REFUSED, '<?xml version="1.0" encoding="IBM037"?>' + GOOD, "only UTF-8"),
    case(
        "an entity declared without DOCTYPE", REFUSED, '<!ENTITY x SYSTEM "CANARY">' + holding("&x;"), "DOCTYPE"
    ),
    case("entity bomb", REFUSED, LAUGHS + holding("&i;"), "DOCTYPE"),
    case("quadratic entity bomb", REFUSED, QUADRATIC, "DOCTYPE"),
    case("external entity", REFUSED, '<!DOCTYPE m [<!ENTITY x SYSTEM "CANARY">]>' + holding("&x;"), "DOCTYPE"),
    case(
        "external parameter entity",
        REFUSED,
        '<!DOCTYPE m [<!ENTITY % x SYSTEM "CANARY"> %x;]>' + GOOD,
        "DOCTYPE",
    ),
    case("external DTD", REFUSED, '<!DOCTYPE m SYSTEM "CANARY">' + GOOD, "DOCTYPE"),
    case("100,000 deep", REFUSED, "<a>" * 100_000 + "</a>" * 100_000, "deep"),
    case("100,000 deep and not closed", REFUSED, enveloped(calculate("<a>" * 100_000)), "deep"),
    case("100,000 deep behind prose", REFUSED, "Here & there: " + HEAD + "<a>" * 100_000, "pieces"),
    case("65 deep", REFUSED, enveloped(calculate("<a>" * 63 + "</a>" * 63)), "deeper than 64"),
    case("50 MB of text", REFUSED, holding("x" * 50_000_000), "bytes"),
    case(
        "50,000 attributes",
        REFUSED,
        enveloped("<a " + " ".join(f"a{n}='1'" for n in range(50_000)) + "/>"),
        "attrib",
    ),
    case(
        "20,000 namespaces",
        REFUSED,
        enveloped("<a " + " ".join(f"xmlns:a{n}='urn:{n}'" for n in range(20_000)) + "/>"),
        "attributes",
    ),
    case(
        "a long namespace at many elements",
        REFUSED,
        enveloped(f'<a xmlns="urn:x" xmlns:p="urn:{"x" * 50_000}">' + "<p:b/>" * 20_000 + "</a>"),
        "namespace",
    ),
    case(
        "a small document that is large in canonical form",
        REFUSED,
        enveloped(
            '<a xmlns="urn:x" xmlns:p="urn:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx">' + "<p:b/>" * 100_000 + "</a>"
        ),
        "canonical",
    ),
    case(
        "a namespace whose canonical form would be another",
        REFUSED,
        enveloped('<a xmlns="urn:e&#38;#x4A;"/>'),
        "has no canonical form",
    ),
    case(
        "a namespace with an ampersand, mended",
        REFUSED,
        enveloped('<a xmlns="urn:e?a=1&b=2">&</a>'),
        "has no canonical form",
    ),
    case(
        "a namespace with a brace",
        REFUSED,
        enveloped('<a xmlns="}urn:x"/>'),
        "is not a valid URI",
    ),
    case("an attribute without a value", REFUSED, GOOD.replace("<to>", "<to now>"), "cannot be read"),
    case("an attribute twice", REFUSED, GOOD.replace("<to>", '<to a="1" a="2">'), "twice"),
    case(
        "an attribute twice by two prefixes",
        REFUSED,
        GOOD.replace("<to>", '<to xmlns:a="urn:a" xmlns:b="urn:a" a:x="1" b:x="2">'),
        "namespace",
    ),
    case("a prefix that is not declared", REFUSED, GOOD.replace("calculate", "c:calculate"), "prefix c"),
    case(
        "the prefix xml for another namespace",
        REFUSED,
        GOOD.replace("<to>", '<to xmlns:xml="urn:x">'),
        "namespace",
    ),
    case("NUL", REFUSED, holding("a\0b"), "NUL"),
    case("invalid UTF-8", REFUSED, holding("é").encode("latin-1"), "not UTF-8"),
    case("overlong UTF-8", REFUSED, GOOD.encode().replace(b"<to>", b"\xc0\xbcto>"), "not UTF-8"),
    case("a surrogate in UTF-8", REFUSED, holding("x").encode().replace(b"x<", b"\xed\xa0\x80<"), "not UTF-8"),
    case("two documents", REFUSED, GOOD + GOOD, "more than one element"),
    case("two documents with prose between them", REFUSED, f"First:\n{GOOD}\nthen:\n{GOOD}", "more than one"),
    case("a document in a comment", REFUSED, f"<!-- {GOOD} -->", "no XML"),
    case("a comment that is not closed", REFUSED, GOOD.replace("<to>", "<!-- <to>"), "not closed"),
    case("a CDATA section that is not closed", REFUSED, holding("<![CDATA[1 + 2"), "not closed"),
    case("cut off in a value", REFUSED, HEAD + f'<calculate xmlns="{SPACE}"><expression>12', "cut off"),
    case("cut off in a start tag", REFUSED, HEAD + f'<calculate xmlns="{SPACE}"><expr', "cut off"),
    case(
        "an end tag too many, with text behind it",
        REFUSED,
        holding("1</b> + 2", after="</calculate> + 3"),
        "lose",
    ),
    case("too many characters < to be XML", REFUSED, holding("< " * 5000), "begin no tag"),
]
