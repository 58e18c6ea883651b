"""Values of payloads to XML and back (XP-01, XP-02): whatever can be written is valid and read as it was."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from connectors.doors.xml_pump import Pipeline, payload, payload_type_of, to_xml
from connectors.plumbing.xml_payloads.payload_types import from_element
from connectors.plumbing.xml_wire.documents import Faulty
from connectors.plumbing.xml_wire.safe_xml import canonical_bytes
from tests.connectors.doors.xml_pump.pump_payloads import Calculate, Colour, EveryKind, Part

pytestmark = [pytest.mark.requirement("XP-01"), pytest.mark.requirement("XP-02")]

KIND = payload_type_of(EveryKind)
PIPELINE = Pipeline(KIND)
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
MOMENTS = st.datetimes(timezones=st.none() | ZONES)
# All characters that XML can hold, the ones that it must escape more often.
TEXTS = st.text(
    st.sampled_from("<>&\"'\r\n\t ]")
    | st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff")
)
PARTS = st.builds(Part, TEXTS, st.none() | st.floats(allow_nan=False))
VALUES = st.builds(
    EveryKind,
    text=TEXTS,
    whole=st.integers() | st.integers(-(10**200), 10**200),
    number=st.floats(allow_nan=False),
    yes=st.booleans(),
    exact=st.decimals(allow_nan=False, allow_infinity=False),
    moment=MOMENTS,
    day=st.dates(),
    colour=st.sampled_from(Colour),
    mode=st.sampled_from(["fast", "slow", 1]),
    part=PARTS,
    maybe=st.none() | TEXTS,
    maybe_part=st.none() | PARTS,
    numbers=st.lists(st.integers(), max_size=3),
    parts=st.lists(PARTS, max_size=3),
    tries=st.integers(),
)
ONE = EveryKind(
    "a", 1, 1.0, True, Decimal(1), datetime(2030, 1, 1, tzinfo=UTC), date(2030, 1, 1), Colour.RED, 1, Part("p")
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_a_value_is_written_as_canonical_and_valid_xml_and_read_as_it_was(value: EveryKind) -> None:
    written = to_xml(value)
    element = etree.fromstring(written)
    assert KIND.schema.validate(element), KIND.schema.error_log
    assert from_element(EveryKind, element) == value
    assert canonical_bytes(element) == written
    taken = PIPELINE.run_payload(written)
    assert taken == value
    assert type(taken.number) is float
    assert taken.moment.utcoffset() == value.moment.utcoffset()


@pytest.mark.parametrize("number", [math.inf, -math.inf, 5e-324, 1.7976931348623157e308, -0.0, 0.1])
def test_the_farthest_floats_arrive(number: float) -> None:
    taken = PIPELINE.run_payload(to_xml(replace(ONE, number=number)))
    assert (taken.number, math.copysign(1, taken.number)) == (number, math.copysign(1, number))


def test_not_a_number_arrives_as_such_and_an_int_in_a_float_as_float() -> None:
    assert math.isnan(PIPELINE.run_payload(to_xml(replace(ONE, number=math.nan))).number)
    assert PIPELINE.run_payload(to_xml(replace(ONE, number=3))).number == 3.0


def test_integers_of_up_to_4000_digits_arrive() -> None:
    assert PIPELINE.run_payload(to_xml(replace(ONE, whole=-(10**4000) + 1))).whole == -(10**4000) + 1


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("text", 1, "it is of the type int, not text"),
        ("text", None, "NoneType"),
        ("text", "a\0b", "a character that XML cannot hold"),
        ("text", "\x1b[31m", "a character that XML cannot hold"),
        ("text", "\ud800", "a character that XML cannot hold"),
        ("text", "\uffff", "a character that XML cannot hold"),
        ("whole", True, "type bool"),
        ("whole", 1.0, "type float"),
        ("whole", 10**4000, "more than 4000 digits"),
        ("number", "1", "type str"),
        ("number", 10**400, "beyond the numbers of a float"),
        ("yes", 1, "type int"),
        ("exact", Decimal("NaN"), "no finite number"),
        ("exact", Decimal("-Infinity"), "no finite number"),
        ("exact", Decimal("1E+999999"), "more than 4000 digits"),
        ("exact", Decimal("1E-999999"), "more than 4000 digits"),
        ("exact", Decimal("0E-999999"), "more than 4000 digits"),
        ("exact", Decimal("0E+999999"), "more than 4000 digits"),
        ("exact", 1.5, "type float"),
        ("moment", date(2030, 1, 1), "type date"),
        ("moment", datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=15))), "time zone"),
        ("moment", datetime(2030, 1, 1, tzinfo=timezone(timedelta(seconds=1))), "time zone"),
        ("day", datetime(2030, 1, 1, tzinfo=UTC), "type datetime"),
        ("colour", "red", "none of the values"),
        ("mode", "quick", "none of the values"),
        ("mode", "1", "none of the values"),
        ("mode", True, "none of the values"),
        ("mode", ["fast"], "none of the values"),
        ("part", None, "type NoneType, not Part"),
        ("part", ONE, "type EveryKind, not Part"),
        ("maybe", 1, "type int"),
        ("numbers", None, "not a list"),
        ("numbers", (1,), "not a list"),
        ("numbers", [None], "NoneType"),
        ("parts", [Part(1)], "type int"),
    ],
)
def test_what_xml_or_the_schema_cannot_hold_is_not_written_and_the_field_is_named(
    field: str, value: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=rf"EveryKind\.{field}.*{why}"):
        to_xml(replace(ONE, **{field: value}))


def changed(field: str, text: str) -> bytes:
    """The example of a payload, with another text in a field."""
    start, rest = KIND.example.decode().split(f"<{field}>", 1)
    return f"{start}<{field}>{text}</{field}>{rest.split(f'</{field}>', 1)[1]}".encode()


@pytest.mark.parametrize(
    ("field", "text", "step"),
    [
        ("whole", "1_000", "payload"),
        ("whole", "", "payload"),
        ("whole", "9" * 4001, "value"),
        ("number", "inf", "payload"),
        ("number", "1,5", "payload"),
        ("yes", "yes", "payload"),
        ("yes", "True", "payload"),
        ("exact", "1E5", "payload"),
        ("moment", "2030-01-01", "payload"),
        ("moment", "2030-02-29T00:00:00", "payload"),
        ("moment", "2030-01-01T24:00:00", "value"),
        ("moment", "0000-01-01T00:00:00", "payload"),
        ("moment", "12030-01-01T00:00:00", "payload"),
        ("moment", "2030-01-01T00:00:00.1234567", "payload"),
        ("day", "2030-13-01", "payload"),
        ("day", "2030-01-01Z", "payload"),
        ("colour", "green", "payload"),
        ("colour", " red", "payload"),
        ("mode", "", "payload"),
    ],
)
def test_a_text_that_is_no_value_is_told_with_the_field_and_an_example(
    field: str, text: str, step: str
) -> None:
    with pytest.raises(Faulty) as told:
        PIPELINE.run_payload(changed(field, text))
    assert told.value.step == step
    assert field in told.value.why
    assert told.value.expected == KIND.example.decode()
    # Without a schema it is found, too.
    with pytest.raises(Faulty) as told:
        from_element(EveryKind, etree.fromstring(changed(field, text)))
    assert (told.value.step, field in told.value.why) == ("value", True)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("whole", " +007\n", 7),
        ("number", "-INF", -math.inf),
        ("number", "1E400", math.inf),
        ("number", ".5", 0.5),
        ("yes", " 1 ", True),
        ("yes", "0", False),
        ("exact", "-.50", Decimal("-0.5")),
        ("moment", "2030-01-01T00:00:00Z", datetime(2030, 1, 1, tzinfo=UTC)),
        ("moment", "2030-01-01T00:00:00.5-02:30",
         datetime(2030, 1, 1, microsecond=500_000, tzinfo=timezone(-timedelta(minutes=150)))),
        ("colour", "deep blue &lt;&amp;&gt;", Colour.DEEP_BLUE),
        ("mode", "1", 1),
    ],
)  # fmt: skip
def test_each_way_to_write_a_value_in_xml_is_read(field: str, text: str, value: Any) -> None:
    assert getattr(PIPELINE.run_payload(changed(field, text)), field) == value


def test_what_is_left_out_is_the_default_none_or_an_empty_list() -> None:
    written = to_xml(replace(ONE, maybe="x", numbers=[1]))
    for part in (b"<maybe>x</maybe>", b"<numbers>1</numbers>", b"<tries>3</tries>"):
        assert part in written
        written = written.replace(part, b"")
    taken = PIPELINE.run_payload(written)
    assert (taken.maybe, taken.numbers, taken.tries) == (None, [], 3)


def test_an_element_that_no_schema_has_looked_at_is_read_with_care() -> None:
    space = payload_type_of(Calculate).namespace
    for inner, why in (
        ("", "<expression> is missing"),
        ("<expression>1</expression><expression>2</expression>", "twice"),
        ("<expression><b/></expression>", "an element in it"),
        ("<other/>", "no field"),
    ):
        with pytest.raises(Faulty, match=why):
            from_element(Calculate, etree.fromstring(f'<calculate xmlns="{space}">{inner}</calculate>'))
    with pytest.raises(Faulty, match="not a <calculate>"):
        from_element(Calculate, etree.fromstring("<calculate/>"))


@payload("strict", namespace="urn:example:strict:1")
@dataclass
class Strict:
    """A payload with a rule of its own."""

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError("share is from 0 to 1")


def test_a_rule_of_the_class_is_told_as_a_fault_of_the_value() -> None:
    with pytest.raises(Faulty, match="share is from 0 to 1") as told:
        Pipeline(payload_type_of(Strict)).run_payload(to_xml(Strict(1.0)).replace(b"1.0", b"1.5"))
    assert told.value.step == "value"
