"""Untrusted text as a terminal shows it, and as a client that follows the events receives it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from connectors.cli.organism.console_lines import Known, document_of, shown_xml
from connectors.cli.shared.text_output import aligned, fields
from connectors.plumbing.xml_wire.documents import XmlRefused
from connectors.plumbing.xml_wire.safe_xml import repair
from tests.fuzz.fuzzing import JSON, fuzzed, mutated, mutated_text
from trunkline_agent.errors import UsageError
from trunkline_agent.terminal_text import escaped

SAID = ("done 3/10", "\x1b[2J\x1b]0;title\x07", "grün \u202e\u200b", "a\r\nb\u2028c", "x" * 200)
TEXTS = st.one_of(st.text(max_size=60), st.sampled_from(SAID), mutated_text("<a x='1'>b<c/></a>"))


@pytest.mark.requirement("CM-06")
@fuzzed(TEXTS, examples=100)
def test_whatever_is_said_is_shown_in_characters_that_no_terminal_obeys(case: str) -> str:
    """One line in, one line out; escaping again changes nothing."""
    shown = escaped(case)
    assert shown.isprintable()
    assert escaped(shown) == shown
    for line in shown_xml(case).split("\n"):
        assert line.startswith("    ")
        assert line.isprintable()
    return "as it is" if shown == case else "escaped"


@pytest.mark.requirement("CM-06")
@fuzzed(st.lists(st.tuples(TEXTS, JSON), max_size=3), examples=60)
def test_a_table_has_a_line_for_each_row_whatever_its_cells_say(case: list[Any]) -> str:
    """A cell that could break a line or move the cursor could forge a row."""
    table = aligned(["said", "more"], case)
    assert len(table.split("\n")) == 1 + len(case)
    assert all(line.isprintable() for line in table.split("\n"))
    row = {f"f{number}": value for number, (_, value) in enumerate(case)}
    assert all(line.isprintable() for line in fields(row).split("\n"))
    return f"{len(case)} rows"


KNOWN = Known({"calculate": "urn:x:1"}, {"calculator": "urn:x:1"}, {3: ("ann", "t1")})
LINES = (
    '<calculate xmlns="urn:x:1"><expression>1+1</expression></calculate>',
    "@calculator calculate expression='1 + 1'",
    "#3 calculate expression=2",
    "calculate expression=2 more=3",
)


@pytest.mark.requirement("XP-10")
@fuzzed(
    mutated(*(line.encode() for line in LINES)).map(lambda raw: raw.decode("utf-8", "replace")), examples=100
)
def test_a_line_of_the_console_is_a_document_or_wrong_usage(case: str) -> str:
    """A line that a person types or pastes becomes one message, in an envelope that the console writes."""
    if not case.strip():
        return "nothing"
    try:
        document = document_of(case, KNOWN)
    except UsageError:
        return "wrong usage"
    try:
        root = repair(document).root
    except XmlRefused:
        return "no xml"
    assert "}" in root.tag
    return "a document"
