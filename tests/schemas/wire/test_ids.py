"""Ids and names (CM-01): what may stand in a topic, a file name or a Kafka key."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.streams.fold import KINDS
from trunkline_agent.wire.ids import is_job_id, is_name, new_job_id, parse_stream_key, stream_key

pytestmark = pytest.mark.requirement("CM-01")

NAMES = ("a", "A9._-z", "0", "x" * 128)
NO_NAMES = (
    "x" * 129,
    "",
    ".",
    "..",
    ".hidden",
    "-rf",
    "_x",
    "a/b",
    "a\\b",
    "a b",
    "+",
    "#",
    "a#",
    "a\n",
    "a\x00",
    "a\u0661",
    "ä",
    "a:b",
    "a%2fb",
    "$SYS",
)


@pytest.mark.parametrize("text", NAMES + NO_NAMES)
def test_a_name_holds_no_path_no_wildcard_and_no_control_character(text: str) -> None:
    assert is_name(text) == (text in NAMES)


@given(st.text(max_size=140))
def test_a_name_is_what_the_rule_says(text: str) -> None:
    assert is_name(text) == (re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None and len(text) <= 128)


@pytest.mark.parametrize(
    "text", ["AB12CD34", "ab12cd3", "ab12cd345", "ab12cd3g", "ab12cd34\n", "", None, 12345678]
)
def test_a_job_id_is_eight_lower_case_hex_digits_and_nothing_else(text: object) -> None:
    assert not is_job_id(text)
    assert is_job_id("ab12cd34")


def test_new_job_ids_are_job_ids_and_differ() -> None:
    made = {new_job_id() for _ in range(50)}
    assert len(made) == 50
    assert all(is_job_id(job_id) for job_id in made)


@given(st.sampled_from(list(KINDS)), st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True))
def test_the_key_of_a_stream_is_read_back_as_its_kind_and_name(kind: str, name: str) -> None:
    if (kind == "job" and not is_job_id(name)) or kind == "mailbox":
        with pytest.raises(ValueError, match="not a name"):
            stream_key(kind, name)
    else:
        assert parse_stream_key(stream_key(kind, name).encode("ascii")) == (kind, name)


@given(st.binary(max_size=300) | st.none())
def test_any_bytes_are_a_stream_key_or_none(key: bytes | None) -> None:
    found = parse_stream_key(key)
    assert found is None or f"{found[0]}/{found[1]}".encode() == key


@pytest.mark.parametrize("name", ["../x", "a/b", "#", "", "x" * 129])
def test_no_key_is_made_of_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        stream_key("refused", name)
