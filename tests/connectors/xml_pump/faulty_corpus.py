"""The documents of the corpus that are XML, and not what was asked for: their senders are told."""

from __future__ import annotations

from tests.connectors.xml_pump.document_corpus import HUH, XSI, case, holding
from tests.connectors.xml_pump.pump_payloads import GOOD, HEAD, SPACE, calculate, enveloped

XINCLUDE = '<xi:include xmlns:xi="http://www.w3.org/2001/XInclude" href="CANARY" parse="text"/>'
# The name of the file is put in by the test, which looks for its content in all that comes back.
CANARY = "CANARY"

FAULTY_DOCUMENTS = [
    case("no envelope", HUH, calculate(), "a bare <calculate>"),
    case("no envelope and not closed", HUH, calculate().removesuffix("</calculate>"), "a bare <calculate>"),
    case("an envelope in another element", HUH, f"<reply>{GOOD}</reply>", "a bare <reply>"),
    case("HTML", HUH, "<html><body>502 Bad Gateway</body></html>", "a bare <html>"),
    case("no namespace of the envelope", HUH, GOOD.replace(HEAD, "<message>"), "has no xmlns"),
    case("another version of the envelope", HUH, GOOD.replace("envelope:1", "envelope:2"), "envelope:1"),
    case(
        "the envelope of the peer", HUH, '<message xmlns="https://xml-pipeline.org/ns/envelope/v1"/>', "xmlns"
    ),
    case("the envelope in another case", HUH, GOOD.replace("message", "Message"), "a bare <Message>"),
    case("no payload", HUH, enveloped(""), "no payload"),
    case("text for a payload", HUH, enveloped("1 + 2"), "text directly in <message>"),
    case("text beside the payload", HUH, enveloped(calculate() + " please"), "text directly in <message>"),
    case("two payloads", HUH, enveloped(calculate() * 2), "2 payloads"),
    case("a payload without a namespace of its own", HUH, GOOD.replace(f' xmlns="{SPACE}"', ""), "of its own"),
    case("a payload in no namespace", HUH, GOOD.replace(SPACE, ""), f'xmlns="{SPACE}"'),
    case("a payload of another namespace", HUH, GOOD.replace(SPACE, "urn:example:evil:1"), f'xmlns="{SPACE}"'),
    case("a namespace that is not absolute", HUH, GOOD.replace(SPACE, "calculator"), "not an absolute URI"),
    case("a namespace that is no URI", HUH, enveloped('<a xmlns="urn:a b"/>'), "not an absolute URI"),
    case("two addressees", HUH, enveloped(calculate(), "<to>a</to><to>b</to>"), "<to> occurs twice"),
    case("an empty addressee", HUH, enveloped(calculate(), "<to/>"), "<to> is empty"),
    case(
        "an addressee that is no name",
        HUH,
        enveloped(calculate(), "<to>../../etc</to>"),
        "not the name of a listener",
    ),
    case("an addressee that is not closed", HUH, GOOD.replace("</to>", ""), "not closed"),
    case(
        "an addressee that was split by a comment into a name and a way out",
        HUH,
        enveloped(calculate(), "<to>calc<!-- -->/../root</to>"),
        "not the name of a listener",
    ),
    case(
        "a thread that is no UUID",
        HUH,
        enveloped(calculate(), "<thread>root</thread>"),
        "<thread> is not a UUID",
    ),
    case(
        "heads in another order",
        HUH,
        enveloped(calculate(), f"<thread>{'0' * 8}-0000-0000-0000-{'0' * 12}</thread><to>a</to>"),
        "the order is to, thread, payload",
    ),
    case(
        "heads behind the payload", HUH, enveloped(calculate() + "<to>a</to>", ""), "the order is to, payload"
    ),
    case("an unknown head", HUH, enveloped(calculate(), "<priority>high</priority>"), "2 payloads"),
    case(
        "an attribute of the envelope",
        HUH,
        GOOD.replace("<message ", '<message to="x" '),
        "takes no attributes",
    ),
    case("another root tag", HUH, enveloped('<shutdown xmlns="urn:x:1"/>'), "<calculate xmlns="),
    case("a root tag that is no name", HUH, enveloped('<_é xmlns="urn:x:1"/>'), "is not a name"),
    case(
        "a field that is missing", HUH, enveloped(calculate("<digits>1</digits>")), "Expected is ( expression )"
    ),
    case("a field that is not known", HUH, holding("1", after="<precision>1</precision>"), "'precision'"),
    case("fields in another order", HUH, holding("1", before="<digits>1</digits>"), "'digits'"),
    case("a word for a number", HUH, holding("1", after="<digits>three</digits>"), "xs:integer"),
    case("a number in other digits", HUH, holding("1", after="<digits>٣</digits>"), "xs:integer"),
    case("a number that no int takes", HUH, holding("1", after=f"<digits>{'9' * 5000}</digits>"), "an integer"),
    case("an attribute of a field", HUH, GOOD.replace("<expression>", '<expression lang="en">'), "not allowed"),
    case("an element in a text", HUH, holding("<b>1</b> + 2"), "Element content is not allowed"),
    case(
        "text between the fields", HUH, enveloped(calculate("so: <expression>1</expression>")), "element-only"
    ),
    case("nil", HUH, GOOD.replace("<expression>", f'<expression {XSI} xsi:nil="true">'), "nil"),
    case(
        "nil beside a hint",
        HUH,
        GOOD.replace("<expression>", f'<expression {XSI} xsi:schemaLocation="urn:x x" xsi:nil="true">'),
        "nil",
    ),
    case(
        "a message in no namespace for a payload", HUH, enveloped('<message xmlns=""/>'), "without a namespace"
    ),
    case("XInclude for a payload", HUH, enveloped(XINCLUDE), "<calculate xmlns="),
    case("XInclude in a payload", HUH, enveloped(calculate(XINCLUDE)), "not expected"),
    case(
        "a privileged command on the main way",
        HUH,
        enveloped('<hot-reload xmlns="urn:trunkline:command:1"/>'),
        "<calculate xmlns=",
    ),
    case("a message in a message", HUH, enveloped(GOOD), "no namespace of its own"),
]
