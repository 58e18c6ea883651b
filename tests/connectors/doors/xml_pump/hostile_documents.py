"""Documents that hypothesis makes up: rubbish, and good documents that something was done to."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.connectors.doors.xml_pump.document_corpus import CORPUS, DOCTYPE
from tests.connectors.doors.xml_pump.pump_payloads import GOOD, HEAD, SPACE, THREAD, calculate

_SEEDS = [case.document for case in CORPUS if len(case.document) < 6000]
_WORDS = """
    </ /> <!-- --> <![CDATA[ ]]> <? ?> &amp; &lt; &#0; &#x41; &#xFFFFFFFF; &LT; &nbsp; &x; & xmlns
    xmlns="" xmlns:p="urn:p" xmlns:xml='u' xml:space p: xsi:type xsi:schemaLocation
    xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" </message> <message> <to>c</to>
    <from>x</from> <answer> </answer> <calculate> </calculate> <expression> </expression> <tag/>
    <digits>7</digits> <digits> </digits>
"""
_FRAGMENTS = [
    *_WORDS.split(),
    *"<>&;\"'=/!?-[] \n\r\t\0\x1b“”é",
    "<?xml version='1.0'?>",
    "<!DOCTYPE ",
    DOCTYPE,
    f'xmlns="{SPACE}"',
    " xmlns='a b'",
    ' a="1"',
    " a=1",
    HEAD,
    f"<thread>{THREAD}</thread>",
    calculate(),
    "<a>" * 70,
    "<e:message xmlns:e='urn:trunkline:envelope:1'>",
    "\ud800",
]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_CUT = st.tuples(st.integers(0, 2000), st.integers(0, 40), st.sampled_from(_FRAGMENTS).map(_bytes))


def _mutated(parts: tuple[bytes, list[tuple[int, int, bytes]]]) -> bytes:
    document, cuts = parts
    for where, length, put in cuts:
        where %= len(document) + 1
        document = document[:where] + put + document[where + length :]
    return document


FRAGMENTS = st.lists(st.sampled_from(_FRAGMENTS), max_size=30).map("".join).map(_bytes)
MUTATED = st.tuples(st.sampled_from(_SEEDS), st.lists(_CUT, min_size=1, max_size=6)).map(_mutated)
RUBBISH = st.one_of(st.binary(max_size=300), st.text(max_size=100).map(lambda text: text.encode()))
SURROUNDED = FRAGMENTS.map(lambda around: around + GOOD.encode() + around)
FILLED = st.tuples(FRAGMENTS, st.sampled_from([b"7", b" +7 ", b"seven", b"9" * 4001, b"7&"])).map(
    lambda parts: GOOD.encode().replace(b"1 + 2</expression>", b"%b</expression><digits>%b</digits>" % parts)
)
DOCUMENTS = st.one_of(MUTATED, FRAGMENTS, RUBBISH, SURROUNDED, FILLED)
