"""The envelope (XP-04), what a handler answers (XP-06), and messages of other doors."""

from __future__ import annotations

import time

import pytest

from connectors.plumbing.xml_wire.documents import QUOTED_CHARACTERS, Faulty, XmlLimits, XmlRefused
from connectors.plumbing.xml_wire.envelope import open_answer, open_document, text_payload, wrapped
from tests.connectors.doors.xml_pump.pump_payloads import GOOD, HEAD, SPACE, THREAD, calculate, enveloped

CANONICAL = calculate().encode()


@pytest.mark.requirement("XP-04")
def test_an_opened_document_tells_who_where_and_what() -> None:
    heads = f"<from> ann </from><to>\n calculator </to><thread> {THREAD.upper()} </thread>"
    opened = open_document(enveloped(calculate(), heads).encode())
    assert (opened.to, opened.thread, opened.claimed_sender) == ("calculator", THREAD, "ann")
    assert (opened.root_tag, opened.namespace, opened.payload) == ("calculate", SPACE, CANONICAL)
    assert opened.notes == ("<from> is ignored: the pump writes it itself",)


def test_a_payload_is_canonical_whatever_it_was_written_like() -> None:
    written = (
        f"<?xml version='1.0'?><e:message xmlns:e='urn:trunkline:envelope:1' xmlns='{SPACE}' xmlns:q='urn:q' >"
        "<calculate  ><expression><![CDATA[1]]> + 2<!-- two --></expression></calculate ></e:message>"
    )
    assert open_document(written.encode()).payload == CANONICAL


@pytest.mark.requirement("XB-05")
@pytest.mark.parametrize(
    ("payload", "canonical"),
    [
        (
            '<note xmlns="urn:x:1" xmlns:p="urn:p:1"><ref kind="p:a">p:thing</ref></note>',
            b'<note xmlns="urn:x:1" xmlns:p="urn:p:1"><ref kind="p:a">p:thing</ref></note>',
        ),
        ('<n xmlns:p="urn:p" xmlns:q="urn:q">see (p:a)</n>', b'<n xmlns:p="urn:p">see (p:a)</n>'),
        ('<n><a xmlns:p="urn:1">p:x</a><b>p:x</b></n>', b'<n><a xmlns:p="urn:1">p:x</a><b>p:x</b></n>'),
        ('<n xmlns:http="urn:p" k="http://x 1:2 :p p:"/>', b'<n k="http://x 1:2 :p p:"></n>'),
        ('<n k="out:side"/>', b'<n xmlns:out="urn:out" k="out:side"></n>'),
        ("<n>e:x</n>", b"<n>e:x</n>"),
    ],
    ids=[
        "text and attribute",
        "used ones only",
        "declared inside",
        "no names",
        "of the envelope",
        "the envelope's",
    ],
)
def test_a_prefix_that_a_content_uses_keeps_its_declaration(payload: str, canonical: bytes) -> None:
    namespaces = 'xmlns:e="urn:trunkline:envelope:1" xmlns:out="urn:out"'
    opened = open_document(f"<e:message {namespaces}>{payload}</e:message>".encode())
    assert opened.payload == canonical
    again = open_document(wrapped(opened.payload, sender="ann", to=None, thread=None))
    assert again.payload == canonical


SCHEMA = b'<xs:schema xmlns="urn:t" xmlns:xs="urn:xs"><xs:element type="thing"></xs:element></xs:schema>'


@pytest.mark.requirement("XB-05")
@pytest.mark.parametrize(
    "payload",
    [SCHEMA, b'<a xmlns="urn:a">' + SCHEMA + b"<b></b></a>", b'<a:n xmlns:a="urn:a">' + SCHEMA + b"</a:n>"],
    ids=["root", "below another default namespace", "below a prefix"],
)
def test_a_default_namespace_that_an_element_with_a_prefix_declares_is_kept(payload: bytes) -> None:
    for _ in range(2):
        opened = open_document(wrapped(payload, sender="ann", to="bo", thread=THREAD))
        assert opened.payload == payload
    outside = b'<m:message xmlns:m="urn:trunkline:envelope:1" xmlns:p="urn:p"><m:to>bo</m:to>%s</m:message>'
    with pytest.raises(Faulty, match="declare the prefix p in the payload itself"):
        open_document(outside % payload.replace(b'"thing"', b'"p:thing"'))


@pytest.mark.requirement("XB-05")
def test_too_many_prefixes_in_contents_are_refused_in_a_short_time() -> None:
    content = "".join(f'<a xmlns:p{n}="urn:{n}">p{n}:x</a>' for n in range(5000))
    begin = time.process_time()
    with pytest.raises(Faulty, match="5000 prefixes of namespaces: 32 at most"):
        open_document(enveloped(f"<n>{content}</n>").encode())
    assert time.process_time() - begin < 5


@pytest.mark.requirement("XP-04")
@pytest.mark.parametrize(
    "payload",
    [
        CANONICAL,
        b"<calculate><expression>1</expression></calculate>",
        b'<p:calculate xmlns:p="urn:p"><inner></inner></p:calculate>',
        b'<calculate xmlns="urn:trunkline:envelope:2" a="1"><b xmlns=""></b></calculate>',
    ],
)
def test_the_recipient_sees_the_payload_as_it_was_and_the_sender_that_the_pump_knows(payload: bytes) -> None:
    seen = wrapped(payload, sender="a<&>b", to="calculator", thread=THREAD)
    opened = open_document(seen)
    assert (opened.claimed_sender, opened.to, opened.thread) == ("a<&>b", "calculator", THREAD)
    assert opened.payload == payload


def test_an_envelope_without_heads_has_the_sender_only() -> None:
    opened = open_document(wrapped(CANONICAL, sender="ann", to=None, thread=None))
    assert (opened.to, opened.thread, opened.claimed_sender) == (None, None, "ann")


@pytest.mark.requirement("XP-06")
def test_an_answer_holds_several_payloads_bare_or_in_envelopes_in_their_order() -> None:
    second = calculate("<expression>2</expression>")
    answer = f'<?xml version="1.0"?>\n{calculate()}\n{enveloped(second)} <done xmlns="urn:d:1"/>'
    found = open_answer(answer.encode())
    assert [message.payload for message in found] == [
        CANONICAL,
        second.encode(),
        b'<done xmlns="urn:d:1"></done>',
    ]
    assert [message.to for message in found] == [None, "calculator", None]
    assert {message.notes for message in found} == {()}


@pytest.mark.requirement("XP-06")
def test_prose_around_the_payloads_of_an_answer_is_left_out_with_a_note() -> None:
    (found,) = open_answer(f"I would say 1 < 2 & so:\n```xml\n{GOOD}\n```\nRight?".encode())
    assert found.payload == CANONICAL
    assert "characters around the payloads" in "; ".join(found.notes)


@pytest.mark.requirement("XP-06")
@pytest.mark.parametrize("answer", [b"", b" \n", b"<!-- nothing -->", b'<?xml version="1.0"?>'])
def test_nothing_is_no_answer(answer: bytes) -> None:
    assert open_answer(answer) == []


@pytest.mark.requirement("XP-06")
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("I do not know.", "text without any payload"),
        (f"{calculate()}<message><to>x</to></message>", "no xmlns"),
        (f"{HEAD}</message>", "no payload"),
        ("<é/>", "is not a name"),
        ("<a xmlns='b'/>", "not an absolute URI"),
        (f"<x xmlns='{'urn:trunkline:envelope:1'}'/>", "envelope's namespace"),
    ],
)
def test_an_answer_that_is_no_payload_is_a_fault_that_says_what_would_be_right(answer: str, why: str) -> None:
    with pytest.raises(Faulty, match=why) as told:
        open_answer(answer.encode())
    assert "<message xmlns=" in told.value.expected


@pytest.mark.requirement("XP-03")
@pytest.mark.parametrize(
    "answer",
    [
        "</answer><evil/><answer>",
        '<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>',
        '<a>x</a><!DOCTYPE a [<!ENTITY x "y">]>',
        "<a>" * 1000,
        "<a/>" * 101,
        "x" * 2_000_000,
        "<a>\0</a>",
        "<p:a/>",
    ],
    ids=range(8),
)
def test_an_answer_cannot_break_out_and_has_the_limits_of_a_document(answer: str) -> None:
    with pytest.raises(XmlRefused):
        open_answer(answer.encode())


@pytest.mark.requirement("XP-06")
@pytest.mark.parametrize(
    "behind", ["</answer>", "</answer><!-- -->", "</expression>", "</calculate></message>"]
)
def test_end_tags_too_many_behind_an_answer_are_noted(behind: str) -> None:
    (found,) = open_answer(f"{calculate()}{behind}".encode())
    assert (found.payload, len(found.notes) > 0) == (CANONICAL, True)


def test_limits_are_those_that_were_given() -> None:
    limits = XmlLimits(document_bytes=len(GOOD), depth=3, payloads=2)
    assert open_document(GOOD.encode(), limits)
    for document, why in ((f"{GOOD} ", "bytes"), (enveloped("<a><b><c/></b></a>", ""), "deeper than 3")):
        with pytest.raises(XmlRefused, match=why) as refused:
            open_document(document.encode(), limits)
        assert refused.value.reason == "too_large"
    assert len(open_answer(b"<a/><b/>", limits)) == 2
    with pytest.raises(XmlRefused, match="3 payloads"):
        open_answer(b"<a/><b/><c/>", limits)


def test_a_message_of_another_door_becomes_a_text_element_that_hides_nothing() -> None:
    payload = text_payload('as"k', "1 < 2 & ]]> \r\n\x1b[31m<message>")
    (found,) = open_answer(payload)
    assert (found.root_tag, found.namespace, found.payload) == ("text", "urn:trunkline:text:1", payload)
    assert found.notes == ()
    assert b"\xef\xbf\xbd[31m" in payload


def test_a_refusal_quotes_no_more_than_60_characters() -> None:
    long = "x" * 5000
    for document in (
        f"<{long} a='1' a='2'",
        f"<a {long}='1' {long}='2'/>",
        f"<{long}:a/>",
        f"<a xmlns:{long}=''/>",
    ):
        with pytest.raises(XmlRefused) as refused:
            open_document(document.encode())
        assert "x" * (QUOTED_CHARACTERS + 1) not in str(refused.value)
