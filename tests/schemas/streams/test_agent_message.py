"""A message of an agent over MQTT (JE-26): pydantic and the library's plain check decide alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.streams.agents.mqtt_agents import AgentSaid
from schemas.wire.wire_body import body_fault
from trunkline_agent.wire.agent_message import message_fault

pytestmark = pytest.mark.requirement("AG-27")

GOOD = {"schema_version": 1, "message_id": "m-1", "to": "bob", "kind": "note", "body": None, "seq": 1}
ODD = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2**64)
    | st.floats()
    | st.text(max_size=9)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
    | st.sampled_from(("ann", "a b", "x" * 128, "x" * 129, "low", "normal", "high", "../x", "bob\n"))
    | st.sampled_from((0.001, 0.0009, 1, 5.5, 366 * 24 * 3600, 366 * 24 * 3600 + 1))
)
# The fold checks the version before, so the two need not agree on it.
FIELDS = (
    "message_id",
    "to",
    "kind",
    "body",
    "priority",
    "expires_in_s",
    "deliver_after_s",
    "in_reply_to",
    "thread",
    "subject",
    "seq",
    "other",
)


def agree(document: dict[str, Any]) -> bool:
    """True if the two decide alike."""
    return (body_fault(AgentSaid, document) is None) == (message_fault(document) is None)


@given(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3), st.sets(st.sampled_from(FIELDS), max_size=1))
@settings(max_examples=300, deadline=None)
def test_the_model_and_the_check_agree_on_documents_that_are_nearly_messages(
    changed: dict[str, Any], gone: set[str]
) -> None:
    assert agree({k: v for k, v in {**GOOD, **changed}.items() if k not in gone})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "value", [None, True, False, 0, 1, 1.0, 2.5, 2**63, "1", "", [], {}, float("nan"), float("inf")], ids=repr
)
def test_the_model_and_the_check_agree_on_an_odd_value_in_each_field(field: str, value: Any) -> None:
    assert agree({**GOOD, field: value})


@pytest.mark.parametrize(
    ("after_s", "expires_s", "fits"), [(1, 2, True), (2, 2, False), (None, 1, True), (5, None, True)]
)
def test_a_message_that_expires_before_its_delivery_is_refused(
    after_s: float | None, expires_s: float | None, fits: bool
) -> None:
    message = {**GOOD, "deliver_after_s": after_s, "expires_in_s": expires_s}
    assert (message_fault(message) is None) is fits
    assert agree(message)
