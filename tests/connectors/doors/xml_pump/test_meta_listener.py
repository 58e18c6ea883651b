"""The listener that tells of the others: who is answered, and of whom it tells."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.doors.xml_pump.handlers import ListenerMessage
from connectors.doors.xml_pump.special_listeners import META_NAMESPACE, answer_meta
from connectors.plumbing.xml_payloads.deliveries import ListenerInfo, listener_from
from connectors.plumbing.xml_wire.documents import Faulty, XmlLimits

LIST, DESCRIBE = "<list/>", '<describe listener="calculator"/>'


def listener(name: str, **more: Any) -> ListenerInfo:
    return listener_from({"listener": name, "root_tag": "calculate", "namespace": "urn:example:c:1", **more})


LISTENERS = {
    one.name: one
    for one in (
        listener("calculator", xsd='<xs:schema a="1"/>', example="<calculate/>", capability="Adds <&>"),
        listener("hidden"),
        listener("agent", visible_tools=["calculator", "meta"]),
        listener("meta", type="meta"),
    )
}


def ask(inside: str, rule: str, sender: str = "ann", *, verified: bool = True) -> str:
    """The body of the answer, when both questions are allowed by `rule`."""
    options = f'{{"allow_list_capabilities":"{rule}","allow_schema_requests":"{rule}"}}'
    own = listener("meta", type="meta", options=options)
    xml = f'<meta xmlns="{META_NAMESPACE}">{inside}</meta>'.encode()
    message = ListenerMessage(None, xml, "meta", sender, verified, "t", False)
    (answer,) = answer_meta(own, message, LISTENERS, XmlLimits())
    assert answer.to == sender
    return answer.body


@pytest.mark.requirement("XP-14")
@pytest.mark.parametrize("inside", [LIST, DESCRIBE])
def test_who_may_ask_is_what_the_organism_says(inside: str):
    assert "calculator" in ask(inside, "all")
    assert "calculator" in ask(inside, "admin", "operator")
    for rule, sender, verified in (
        ("none", "operator", True),
        ("admin", "ann", True),
        ("admin", "operator", False),
        ("surprise", "operator", True),
    ):
        with pytest.raises(Faulty, match="not given to you"):
            ask(inside, rule, sender, verified=verified)


@pytest.mark.requirement("XP-14")
def test_a_description_has_schema_and_example_as_text():
    assert "&lt;xs:schema" in ask(DESCRIBE, "all")
    assert 'capability="Adds &lt;&amp;>"' in ask(DESCRIBE, "all")
    assert "<example>&lt;calculate/&gt;</example>" in ask(DESCRIBE, "all")


@pytest.mark.requirement("XP-09")
def test_who_was_given_some_listeners_is_told_of_no_others():
    assert "hidden" in ask(LIST, "all")
    assert "hidden" not in ask(LIST, "all", "agent")
    with pytest.raises(Faulty, match="there is no listener of this name"):
        ask('<describe listener="hidden"/>', "all", "agent")
    with pytest.raises(Faulty, match="there is no listener of this name"):
        ask('<describe listener="nobody"/>', "all")


@pytest.mark.parametrize(
    "inside", ["", "<list/><list/>", "<drop/>", '<list xmlns="urn:other"/>', "<list><a/></list>"]
)
def test_another_question_is_answered_with_what_would_be_right(inside: str):
    with pytest.raises(Faulty) as found:
        ask(inside, "all")
    assert "<describe listener=" in found.value.expected


def test_an_answer_that_comes_to_it_is_no_question():
    message = ListenerMessage(None, b'<huh xmlns="urn:trunkline:huh:1"/>', "huh", "ann", True, "t", True)
    assert list(answer_meta(listener("meta", type="meta"), message, LISTENERS, XmlLimits())) == []
