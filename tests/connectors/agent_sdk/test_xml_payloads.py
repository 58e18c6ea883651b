"""The check of an XML payload before it is sent, and what the answers of the XML door mean."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from lxml import etree

from trunkline_agent.errors import MessageRejected, TrunklineError, UsageError
from trunkline_agent.xml.envelope import checked_payload
from trunkline_agent.xml.sender import posted_of, refusal_of

pytestmark = pytest.mark.requirement("AG-84")
PRICE = '<price xmlns="urn:x:shop:1"><article>lämp</article></price>'


def test_text_bytes_and_elements_give_the_same_canonical_payload() -> None:
    element = etree.fromstring(PRICE)
    element.tail = "behind"
    forms = [PRICE, PRICE.encode(), f"<?xml version='1.0' encoding='latin-1'?>{PRICE}", element]
    text = checked_payload("<a><![CDATA[<!DOCTYPE x>]]></a>")
    assert etree.fromstring(text).text == "<!DOCTYPE x>"
    forms.append(f"<!-- a comment -->{PRICE.replace('<article>', '<article><!-- b --><?pi x?>')}")
    assert {checked_payload(form) for form in forms} == {PRICE.encode()}
    found = checked_payload(ElementTree.fromstring(PRICE))  # noqa: S314
    assert etree.fromstring(found).tag == "{urn:x:shop:1}price"


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ("<a><b></a>", "mismatch"),
        ("", "no|empty|XML"),
        ("<a/><a/>", "Extra content"),
        (b"\xff<a/>", "Start tag expected"),
        (b"<a>\xff</a>", "encoding|UTF-8|Input is not proper|[Ii]nvalid"),
        ('<!DOCTYPE a [<!ENTITY e "x">]><a>&e;</a>', "DOCTYPE"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', "DOCTYPE"),
        ('<message xmlns="urn:trunkline:envelope:1"/>', "the envelope"),
        ("<message/>", "the envelope"),
        ("<ü/>", "is no name"),
        ('<a xmlns="relative"/>', "absolute URI"),
        ("<a>" * 65 + "</a>" * 65, "deeper than 64"),
        ({"a": 1}, "found dict"),
    ],
)
def test_a_payload_that_no_listener_could_take_is_refused_before_it_is_sent(payload: object, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        checked_payload(payload)
    assert raised.value.reason == "malformed"


def test_an_answer_has_the_thread_and_the_ids_and_a_huh_becomes_an_error_with_advice() -> None:
    accepted = (
        b'<accepted xmlns="urn:trunkline:pump:1" thread="t"><message id="i" to="a"/>'
        b'<message id="j" to="b"/></accepted>'
    )
    assert posted_of(202, accepted).messages == {"a": "i", "b": "j"}
    assert posted_of(202, accepted).thread == "t"
    huh = (
        '<huh xmlns="urn:trunkline:huh:1"><about>x</about><step>routing</step><why>no\x85listener</why>'
        "<expected>one of a, b</expected></huh>"
    )
    error = refusal_of(posted_of(422, huh.encode()).huh or "")
    assert isinstance(error, MessageRejected)
    assert (str(error), error.reason) == ("routing: no\\x85listener; one of a, b", "huh")
    assert str(refusal_of("<huh")) == "the message was not understood"
    with pytest.raises(TrunklineError, match="no XML of a hub"):
        posted_of(202, b"<html>")
