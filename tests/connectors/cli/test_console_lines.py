"""Typed lines of the console as documents, and XML of agents as it is shown (XP-15, CM-06)."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.cli.organism.console_lines import Known, document_of, shown_xml
from connectors.plumbing.xml_wire.documents import DEFAULT_LIMITS, Faulty, XmlRefused
from connectors.plumbing.xml_wire.envelope import open_document
from trunkline_agent.errors import UsageError

THREAD = "0b8e3c0e-7f64-4c58-9d4e-0c9b8d1f2a3b"
SUMS, TEXT = "urn:example:sums:1", "urn:trunkline:text:1"
KNOWN = Known({"sum": SUMS, "text": TEXT}, {"adder": SUMS, "ann": "urn:example:ann:1"}, {3: ("bob", THREAD)})


@pytest.mark.requirement("XP-15")
@pytest.mark.parametrize(
    ("line", "to", "thread", "payload"),
    [
        (
            '<sum xmlns="urn:x:1"><first>1</first></sum>',
            None,
            None,
            '<sum xmlns="urn:x:1"><first>1</first></sum>',
        ),
        ("<sum><first>1</first></sum>", None, None, f'<sum xmlns="{SUMS}"><first>1</first></sum>'),
        ("@adder <sum/>", "adder", None, f'<sum xmlns="{SUMS}"></sum>'),
        ("@ann <note a='1'/>", "ann", None, '<note xmlns="urn:example:ann:1" a="1"></note>'),
        ("sum first=1 second=2", None, None, f'<sum xmlns="{SUMS}"><first>1</first><second>2</second></sum>'),
        (
            "@adder sum first='a b' second='<&>'",
            "adder",
            None,
            f'<sum xmlns="{SUMS}"><first>a b</first><second>&lt;&amp;&gt;</second></sum>',
        ),
        ("text soup is ready", None, None, f'<text xmlns="{TEXT}">soup is ready</text>'),
        ("@ann text it's 1 = <b>", "ann", None, f'<text xmlns="{TEXT}">it\'s 1 = &lt;b&gt;</text>'),
        ("#3 text yes", "bob", THREAD, f'<text xmlns="{TEXT}">yes</text>'),
        ("nobody", None, None, "<nobody></nobody>"),
        ("<?xml version='1.0'?><sum/>", None, None, f'<sum xmlns="{SUMS}"></sum>'),
        (
            '<message xmlns="urn:trunkline:envelope:1"><to>x</to><a xmlns="urn:x:1"/></message>',
            "x",
            None,
            '<a xmlns="urn:x:1"></a>',
        ),
    ],
    ids=range(12),
)
def test_a_line_is_a_document(line: str, to: str | None, thread: str | None, payload: str):
    opened = open_document(document_of(line, KNOWN), DEFAULT_LIMITS)
    assert (opened.to, opened.thread, opened.payload.decode()) == (to, thread, payload)
    assert opened.notes == ()


@pytest.mark.requirement("XP-15")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("@adder", "and what"),
        ("@a/b <x/>", "no name of a listener"),
        ("#4 <x/>", "no message of this number"),
        ("#x <x/>", "no message of this number"),
        ("#²  <x/>", "no message of this number"),
        ("1+2", "that is no tag"),
        ("sum first=1 second", "name=value"),
        ("sum first='1", "No closing quotation"),
        ("sum first=\x1b[2J", "XML cannot hold"),
    ],
    ids=range(9),
)
def test_what_cannot_be_sent_is_said_with_how_to_write_it(line: str, said: str):
    with pytest.raises(UsageError, match=said):
        document_of(line, KNOWN)


@pytest.mark.requirement("XP-15")
@given(st.text(min_size=1).filter(str.strip))
def test_whatever_is_typed_is_a_document_or_a_fault(line: str):
    try:
        document = document_of(line, KNOWN)
    except UsageError:
        return
    with suppress(XmlRefused, Faulty):
        open_document(document, DEFAULT_LIMITS)


@pytest.mark.requirement("CM-06")
def test_xml_is_indented_and_text_is_escaped_behind_a_margin():
    assert shown_xml("<a><b>1</b><c/></a>") == "    <a>\n      <b>1</b>\n      <c/>\n    </a>"
    assert shown_xml("soup\x1b[2J\nis ready") == "    soup\\x1b[2J\n    is ready"
    assert shown_xml("<a>\u202eevil\u200b</a>") == "    <a>\\u202eevil\\u200b</a>"
    assert shown_xml("<!DOCTYPE a><a/>") == "    <!DOCTYPE a><a/>"
    assert shown_xml("") == "    "


@pytest.mark.requirement("CM-06")
@given(st.text())
def test_nothing_that_is_shown_can_give_the_terminal_a_command(text: str):
    for line in shown_xml(text).split("\n"):
        assert line.isprintable()
        assert line.startswith("    ")
