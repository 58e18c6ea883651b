"""Repair (XP-02): what libxml2 would drop in silence is mended, noted or refused, and never gone."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from connectors.plumbing.xml_wire.documents import XmlRefused
from connectors.plumbing.xml_wire.safe_xml import canonical_bytes, repair
from tests.programs import run_program

# Documents from which libxml2's recovery loses something, changes it, or doubles it.
LOSSES = {
    "an ampersand": ("<a>x & y</a>", b"<a>x  y</a>"),
    "an unknown entity": ("<a>x &foo; y</a>", None),
    "a comparison": ("<a>1<2 and 3</a>", None),
    "text behind a wrong end tag": ("<a></b>x</a>", b"<a></a>"),
    "text behind the root": ("<a>x</a> and more", b"<a>x</a>"),
    "an element behind the root": ("<a/><b/>", b"<a></a>"),
    "an attribute without quotes": ("<a b=c>t</a>", b"<a></a>"),
    "a control character": ("<a>\x01x</a>", b"<a>x</a>"),
    "a reference to no character": ("<a>&#0;x</a>", b"<a>x</a>"),
    "the end of a CDATA section": ("<a>x]]>y</a>", None),
    "a prefix that is not declared": ("<p:a>x</p:a>", None),
    "an attribute twice": ("<a b='1' b='2'/>", None),
}


def recovered(text: str) -> bytes | None:
    """Return the tree that libxml2 alone makes of it."""
    root = etree.fromstring(text.encode(), etree.XMLParser(recover=True, resolve_entities=False))
    try:
        return bytes(etree.tostring(root, method="c14n"))
    except etree.C14NError:
        return None


@pytest.mark.requirement("XP-02")
@pytest.mark.parametrize("name", LOSSES)
def test_what_libxml2_would_lose_in_silence_is_kept_noted_or_refused(name: str) -> None:
    text, lossy = LOSSES[name]
    if lossy is not None:
        assert recovered(text) == lossy, "libxml2 has learned to keep it"
    try:
        repaired = repair(text.encode(), root_tag="a")
    except XmlRefused:
        return
    assert repaired.notes
    kept = "".join(repaired.root.itertext())
    for word in re.findall(r"[a-z0-9]+", re.sub(r"<[a-z/][^<>]*>|&#0;", " ", text)):
        assert word in kept or "characters after the XML" in repaired.notes[0], word


@pytest.mark.requirement("XP-02")
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "<c/>", "one", "two", " ", "<![CDATA[three]]>"]))
)
def test_wrong_tags_never_cost_a_word(pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        repaired = repair(f"<r>{text}</r>".encode(), root_tag="r")
    except XmlRefused:
        return
    words = re.findall("one|two|three", text)
    assert re.findall("one|two|three", "".join(repaired.root.itertext())) == words
    assert len(list(repaired.root.iter())) == 1 + sum(text.count(tag) for tag in ("<a>", "<b>", "<c/>"))


def test_comments_and_instructions_are_out_and_the_text_around_them_is_whole() -> None:
    repaired = repair(b"<a>one<!-- x -->two<?y z?>three<b/>four</a>")
    assert canonical_bytes(repaired.root) == b"<a>onetwothree<b></b>four</a>"
    assert repaired.notes == ("left out: comments (1)", "left out: processing instructions (1)")


def test_canonical_bytes_are_of_the_element_alone() -> None:
    root = repair(b'<a xmlns="urn:a" xmlns:b="urn:b"><b:c y="2" x="1"/> tail</a>').root
    assert canonical_bytes(root[0]) == b'<b:c xmlns:b="urn:b" x="1" y="2"></b:c>'


def test_the_notes_of_a_document_that_is_all_wrong_are_few() -> None:
    repaired = repair(b"<a>" + b"<b>1</c>" * 5000 + b"</a>", root_tag="a")
    assert len(repaired.notes) < 30
    assert "more like these" in repaired.notes[-1]


@pytest.mark.long
def test_a_document_that_is_not_worth_it_is_not_repaired() -> None:
    with pytest.raises(XmlRefused, match="pieces"):
        repair(b"<a>&" + b"<b/>" * 60_000 + b"</a>")


# In a process of its own: it would wait for ever if it opened the pipe.
_SHOWN = """
import sys
from connectors.plumbing.xml_wire.documents import Faulty, XmlRefused
from connectors.plumbing.xml_wire.envelope import open_answer
from tests.connectors.doors.xml_pump.document_corpus import CORPUS
from tests.connectors.doors.xml_pump.test_pipeline_corpus import PIPELINE
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event in ("open", "socket.connect") else None)
for address in sys.argv[1:]:
    for case in CORPUS:
        for taken in (PIPELINE.run, open_answer):
            try:
                taken(case.document.replace(b"CANARY", address.encode()))
            except (Faulty, XmlRefused):
                pass
print(len(CORPUS), opened)
"""


@pytest.mark.long
@pytest.mark.requirement("XP-03")
def test_no_document_of_the_corpus_makes_the_pipeline_read_a_file_or_call_anybody(tmp_path: Path) -> None:
    """libxml2 opens files in C, unseen by Python. So the canaries are a pipe that nobody writes to, and a port
    that sees who calls.
    """
    pipe = tmp_path / "canary"
    os.mkfifo(pipe)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        addresses = (pipe.as_uri(), f"http://127.0.0.1:{listener.getsockname()[1]}/x.dtd")
        done = run_program([sys.executable, "-c", _SHOWN, *addresses])
        assert done.returncode == 0, done.stderr
        count, _, opened = done.stdout.partition(" ")
        assert (int(count) > 60, opened.strip()) == (True, "[]")
        with pytest.raises(BlockingIOError):
            listener.accept()
