"""The wire model of a job event (JE-02): pydantic and the fold's plain check decide alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.streams.job.job_registry import JobEvent
from tests.schemas.job_records import event
from trunkline_agent.wire.job_event import event_fault, has_control_characters
from trunkline_agent.wire.moments import is_utc_timestamp

pytestmark = pytest.mark.requirement("JE-02")

ODD = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2**64)
    | st.floats()
    | st.text(max_size=9)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
    | st.sampled_from(
        ("started", "ab12cd34", "ab12cd34\n", "AB12CD34", "1", "x" * 501, "x" * 500, "\U0001f600" * 500)
    )
    | st.sampled_from(
        ("2026-11-21T10:00:00Z", "2026-11-21T10:00:00.5Z", "2026-11-21 10:00:00Z", "\x7f", "a\tb")
    )
)
FIELDS = ("schema_version", "seq", "job_id", "event", "timestamp", "detail", "data", "model_config", "copy", "")


def model_accepts(document: dict[str, Any]) -> bool:
    """True if pydantic takes the document."""
    try:
        JobEvent.model_validate(document)
    except ValidationError:
        return False
    return True


def check_accepts(document: dict[str, Any]) -> bool:
    """True if the fold's check does."""
    version = document.get("schema_version")
    return type(version) is int and version == 1 and event_fault(document) is None


@given(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=2), st.sets(st.sampled_from(FIELDS), max_size=1))
@settings(max_examples=300, deadline=None)
def test_the_model_and_the_check_agree_on_documents_that_are_nearly_events(
    changed: dict[str, Any], gone: set[str]
) -> None:
    document = {k: v for k, v in event(**changed).items() if k not in gone}
    assert model_accepts(document) == check_accepts(document)


@pytest.mark.parametrize("field", FIELDS[:7])
@pytest.mark.parametrize(
    "value", [None, True, False, 0, 1, 1.0, 2, 2**63, "1", "", [], {}, ["started"]], ids=repr
)
def test_the_model_and_the_check_agree_on_an_odd_value_in_each_field(field: str, value: Any) -> None:
    document = event(**{field: value})
    assert model_accepts(document) == check_accepts(document)


@given(st.dictionaries(st.text(max_size=6), ODD, max_size=6))
@settings(max_examples=100, deadline=None)
def test_the_model_and_the_check_agree_on_any_object(document: dict[str, Any]) -> None:
    assert model_accepts(document) == check_accepts(document)


@given(st.dictionaries(st.text(max_size=6), ODD, max_size=4))
@settings(max_examples=100, deadline=None)
def test_unknown_keys_are_kept_at_the_top_and_in_data(more: dict[str, Any]) -> None:
    document = {**more, **event(data=more)}
    assert repr(sorted(JobEvent.model_validate(document).model_dump().items())) == repr(
        sorted(document.items())
    )


@pytest.mark.parametrize("field", ["seq", "job_id", "event", "timestamp", "detail", "data"])
def test_every_field_is_required_and_the_fault_names_it(field: str) -> None:
    document = event()
    del document[field]
    fault = event_fault(document)
    assert fault is not None
    assert fault.startswith(field)


TIMES = {
    "2026-11-21T10:00:00Z": True,
    "2026-11-21T10:00:00.1Z": True,
    "2026-11-21T10:00:00.123456Z": True,
    "2026-11-21T10:00:00.123456789Z": True,
    "0001-01-01T00:00:00Z": True,
    "9999-12-31T23:59:59.999999Z": True,
    "2024-02-29T00:00:00Z": True,
    "2026-02-29T00:00:00Z": False,
    "2026-11-21T10:00:00": False,
    "2026-11-21T10:00:00+00:00": False,
    "2026-11-21T10:00:00z": False,
    "2026-11-21T10:00Z": False,
    "2026-11-21T10:00:00.Z": False,
    "2026-11-21T10:00:00.1234567890Z": False,
    "2026-11-21T10:00:00,5Z": False,
    "2026-11-21T24:00:00Z": False,
    "2026-11-21T10:60:00Z": False,
    "2026-11-21T10:00:60Z": False,
    "2026-11-21T10:00:+1Z": False,
    "2026-11-21T10:00:-1Z": False,
    "2026-11-21T10:00:0\u0661Z": False,
    "2026-11-21 10:00:00Z": False,
    "20261121T100000Z": False,
    "0000-01-01T00:00:00Z": False,
    "\n2026-11-21T10:00:00Z": False,
    "2026-11-21T10:00:00Z\n": False,
    "Z": False,
    "": False,
}


@pytest.mark.parametrize(("text", "good"), TIMES.items())
def test_a_timestamp_is_iso_8601_in_utc_with_z(text: str, good: bool) -> None:
    assert is_utc_timestamp(text) == good


@given(st.text(alphabet="0123456789-T:.Z+ W", max_size=31))
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_timestamp_or_not_without_raising(text: str) -> None:
    is_utc_timestamp(text)


@given(st.text(max_size=30))
def test_control_characters_are_c0_del_and_c1(text: str) -> None:
    assert has_control_characters(text) == any(ord(c) < 32 or 127 <= ord(c) <= 159 for c in text)
