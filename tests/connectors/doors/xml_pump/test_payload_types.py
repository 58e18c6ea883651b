"""The documents that are derived from a payload class (XP-01), and classes that cannot be one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from datetime import time, timedelta
from enum import Enum, Flag
from typing import Any, Literal

import pytest
from lxml import etree

from connectors.doors.xml_pump import Pipeline, payload, payload_type_of, to_xml
from connectors.plumbing.xml_payloads.payload_types import PayloadType, from_element
from tests.connectors.doors.xml_pump.pump_payloads import SPACE, Calculate, EveryKind, Part

pytestmark = pytest.mark.requirement("XP-01")


@pytest.mark.parametrize("cls", [Calculate, EveryKind], ids=["calculate", "every kind"])
def test_the_schema_takes_the_example_and_the_pipeline_reads_it(cls: type) -> None:
    kind = payload_type_of(cls)
    element = etree.fromstring(kind.example)
    assert kind.schema.validate(element), kind.schema.error_log
    value = Pipeline(kind).run_payload(kind.example)
    assert isinstance(value, cls)
    assert from_element(cls, element) == value
    # The example shows every field, so what is read of it is written as it was.
    assert to_xml(value) == kind.example


def test_names_come_from_the_class_if_none_are_given() -> None:
    kind = payload_type_of(EveryKind)
    assert (kind.root_tag, kind.namespace) == ("every-kind", "urn:trunkline:payload:every-kind:1")
    assert isinstance(kind, PayloadType)
    kind = payload_type_of(Calculate)
    assert (kind.root_tag, kind.namespace, kind.cls) == ("calculate", SPACE, Calculate)


def test_a_tool_description_says_what_a_language_model_must_know() -> None:
    told = payload_type_of(Calculate).tool_description
    assert told == {
        "name": "calculate",
        "description": "Work out an expression.",
        "input_schema": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "for example 1 + 2"},
                "digits": {"type": "integer", "default": 2},
                "tag": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
    }
    every = payload_type_of(EveryKind).tool_description
    assert json.loads(json.dumps(every)) == every
    properties = every["input_schema"]["properties"]
    assert properties["colour"] == {"type": "string", "enum": ["red", "deep blue <&>", "7"]}
    assert properties["parts"]["items"]["required"] == ["name"]
    assert "maybe_part" not in every["input_schema"]["required"]


def test_a_signature_is_no_description() -> None:
    @payload()
    @dataclass
    class Silent:
        word: str

    assert payload_type_of(Silent).tool_description["description"] == ""


def test_a_class_that_was_not_decorated_is_no_payload() -> None:
    class Child(Calculate):
        pass

    for cls in (Child, Part, int):
        with pytest.raises(TypeError, match="decorate it"):
            payload_type_of(cls)


class Mixed(Enum):
    """Values that are written alike."""

    A = 1
    B = "1"


class Bits(Flag):
    """A set of values."""

    A = 1


WRONG_HINTS: dict[str, tuple[Any, str]] = {
    "bytes": (bytes, "no form in XML"),
    "dict[str, int]": (dict[str, int], "no form in XML"),
    "tuple[int, ...]": (tuple[int, ...], "no form in XML"),
    "set[int]": (set[int], "no form in XML"),
    "Any": (Any, "no form in XML"),
    "object": (object, "no form in XML"),
    "complex": (complex, "no form in XML"),
    "time": (time, "no form in XML"),
    "timedelta": (timedelta, "no form in XML"),
    "None": (None, "no form in XML"),
    "list": (list, "no form in XML"),
    "Callable[[], int]": (Callable[[], int], "no form in XML"),
    "int | str": (int | str, "cannot tell which"),
    "int | str | None": (int | str | None, "cannot tell which"),
    "list[list[int]]": (list[list[int]], "no lists"),
    "list[int | None]": (list[int | None], "no None"),
    "list[int] | None": (list[int] | None, "empty list"),
    "Mixed": (Mixed, "written alike"),
    "Bits": (Bits, "a Flag"),
    'Literal["a", True]': (Literal["a", True], "texts or integers"),
    'Literal["a", None]': (Literal["a", None], "texts or integers"),
    'Literal["a\\nb"]': (Literal["a\nb"], "control character"),
    "InitVar[int]": (InitVar[int], "InitVar"),
}


@pytest.mark.parametrize("name", WRONG_HINTS)
def test_a_type_that_xml_cannot_hold_is_refused_when_the_class_is_made_and_its_field_is_named(
    name: str,
) -> None:
    hint, why = WRONG_HINTS[name]
    cls = dataclasses.make_dataclass("Wrong", [("good", str), ("bad", hint)])
    with pytest.raises(TypeError, match=rf"Wrong\.bad: .*{why}"):
        payload()(cls)


def test_a_class_that_cannot_be_read_back_is_refused_and_its_field_is_named() -> None:
    @dataclass
    class Inner:
        bad: bytes

    cases: list[tuple[list[Any], str]] = [
        ([("bad", int, field(init=False, default=1))], "not given to __init__"),
        ([("bad", str | None, "x")], "None could not be said"),
        ([("bad", list[int], field(default_factory=lambda: [1]))], "empty list"),
        ([("bad", Inner)], "no form in XML"),
    ]
    for fields, why in cases:
        with pytest.raises(TypeError, match=rf"Wrong\.bad: .*{why}"):
            payload()(dataclasses.make_dataclass("Wrong", fields))
    with pytest.raises(TypeError, match="not a dataclass"):
        payload()(int)


@dataclass
class Tree:
    """A record that holds itself."""

    children: list[Tree]


def test_a_class_that_holds_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="holds itself"):
        payload()(Tree)


@pytest.mark.parametrize("tag", ["a b", "1a", "é", "x/y", "a:b", "-a", ".a", "a" * 129])
def test_a_root_tag_is_a_name_that_begins_with_a_letter(tag: str) -> None:
    with pytest.raises(TypeError, match="root tag"):
        payload(tag)(dataclasses.make_dataclass("Wrong", []))


@pytest.mark.parametrize(
    "space", ["calculator", "urn:a b", 'urn:"', "urn:trunkline:envelope:1", "urn:" + "x" * 300]
)
def test_a_namespace_is_an_absolute_uri_and_not_the_envelopes(space: str) -> None:
    with pytest.raises(TypeError, match="namespace"):
        payload("wrong", namespace=space)(dataclasses.make_dataclass("Wrong", []))


def test_a_payload_without_fields_is_one() -> None:
    cls = payload("ping")(dataclasses.make_dataclass("Ping", []))
    assert Pipeline(payload_type_of(cls)).run_payload(to_xml(cls())) == cls()
