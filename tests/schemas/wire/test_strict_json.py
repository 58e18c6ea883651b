"""JSON as CM-02 allows it: the fast way and the explicit way give the same answer for every input."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.schemas.streams import job_model
from trunkline_agent.wire import strict_json

pytestmark = pytest.mark.requirement("CM-02")

TEXT = st.text(max_size=12) | st.sampled_from(
    ("\u007f", "\u2028", "\x00\x1f", '"\\/', "\ud7ff\ue000", "\U0001f600")
)
NUMBERS = st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=25,
)


def answer(decoder: Any, value: bytes) -> Any:
    """Return the document with the types of its numbers, or "malformed" if the decoder rejects it."""
    try:
        return repr(decoder(value))
    except (strict_json.MalformedJsonError, RecursionError):
        return "malformed"


def answer_of_the_model(value: bytes) -> Any:
    """The same of the tests' own parser."""
    try:
        return repr(job_model.parse(value))
    except (ValueError, RecursionError):
        return "malformed"


def assert_same_answers(value: bytes) -> None:
    slow = answer(strict_json.decode_slowly, value)
    assert answer(lambda v: strict_json.decode(v)[0], value) == slow
    assert answer_of_the_model(value) == slow


@given(JSON, st.sampled_from((None, 1)), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_both_ways_agree_on_every_document_in_every_notation(
    document: Any, indent: int | None, ascii_only: bool, sort: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only, sort_keys=sort)
    assert_same_answers(text.encode("utf-8"))


@given(
    st.binary(max_size=40) | st.text(alphabet='{}[]:,"\\u0189dDeE+-. truefalsn', max_size=30).map(str.encode)
)
@settings(max_examples=250, deadline=None)
@example(b"-0")
@example(b'{"a":-0}')
@example(b'{"a":1E400}')
@example(b'{"a":18446744073709551615}')
@example(b'"\\ud83d\\ude00"')
@example(b'{"a":"\\ud83d"}')
@example(b'{"a":1}\n')
@example(b"\xef\xbb\xbf{}")
@example(b'{"a":\x0b1}')
@example(b'{"a": 1, "a": 2}')
@example(b'{"a" :1,"a":2}')
@example(b'{"a": 1, "a": 2, "b": "\\u003a"}')
@example(b'{"a": ":", "a": 1}')
@example(b'{"b:": {"a": ":\\":"}, "a": [{"a": 1}]}')
@example(b'{"b": "\n", "a": 1}')
@example(b'{"b": "\x00", "a": 1}')
@example(b'{"b": "\xff", "a": 1}')
@example(b'{"b": "\xed\xa0\xbd", "a": 1}')
@example(b"\xc2\xa01")
@example(b"1_000")
@example("١".encode())
def test_both_ways_agree_on_any_bytes(value: bytes) -> None:
    assert_same_answers(value)


@given(st.dictionaries(TEXT, JSON, min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_both_ways_agree_on_bytes_that_are_nearly_canonical(
    document: dict[str, Any], data: st.DataObject
) -> None:
    value = bytearray(strict_json.canonical(document))
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, max(len(value) - 1, 0)))
        cut = data.draw(st.integers(0, 2))
        value[place : place + cut] = data.draw(
            st.sampled_from((b"", b" ", b'"', b"0", b".0", b"e1", b"\\u0061", b"\xff", b",", b"}", b'"a":1,'))
            | st.binary(max_size=2)
        )
    assert_same_answers(bytes(value))


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_plain_documents_are_written_alike_by_the_fast_and_the_slow_writer(document: Any) -> None:
    if isinstance(document, dict | list) and strict_json.is_plain(document):
        assert (
            strict_json.canonical_plain(document)
            == strict_json.canonical(document)
            == job_model.canonical(document)
        )


@given(st.dictionaries(TEXT, JSON | st.floats(), max_size=4))
@settings(max_examples=150, deadline=None)
@example({"a": "\ud83d"})
@example({"\ud83d": 1})
@example({"a": float("nan")})
@example({"\U00010000": 1, "\uffff": 2})
def test_any_document_is_written_as_the_slow_writer_does_it(document: dict[str, Any]) -> None:
    def written(write: Callable[[Any], bytes]) -> bytes | type[Exception]:
        try:
            return write(document)
        except ValueError as error:
            return type(error)

    def slowly(document: Any) -> bytes:
        form = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
        return json.dumps(document, **form).encode()

    assert written(strict_json.canonical) == written(slowly)


@given(st.dictionaries(TEXT, JSON, max_size=4))
@settings(max_examples=100, deadline=None)
@example({"a": [[[[[[[1]]]]]]]})
@example({"a": [[[[[[[[1]]]]]]]]})
@example({"a": {"a": {"a": [{"a": {"a": {"a": {"a": None}}}}]}}})
def test_a_document_called_plain_is_canonical_as_it_came(document: dict[str, Any]) -> None:
    value = strict_json.canonical(document)
    try:
        found, plain = strict_json.decode(value)
    except strict_json.MalformedJsonError:
        return
    assert found == document
    above = strict_json.MAX_DEPTH - strict_json.FAST_DEPTH
    assert plain == strict_json.is_plain(document, above + 1)
    assert not strict_json.decode(b" " + value)[1]


@pytest.mark.parametrize("depth", [63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("around", ["[", '{"a":'])
def test_nesting_is_allowed_to_64_and_no_deeper(depth: int, around: str) -> None:
    value = (around * depth + "1" + ("]" if around == "[" else "}") * depth).encode()
    assert (answer(lambda v: strict_json.decode(v)[0], value) != "malformed") == (depth <= 64)
    assert (answer(strict_json.decode_slowly, value) != "malformed") == (depth <= 64)


@pytest.mark.parametrize(
    ("literal", "allowed"),
    [
        ("9223372036854775807", True),
        ("9223372036854775808", False),
        ("-9223372036854775808", True),
        ("-9223372036854775809", False),
        ("1" * 10_000, False),
        ("1.7976931348623157e308", True),
        ("1e309", False),
        ("-1e309", False),
        ("1e-400", True),
        ("NaN", False),
        ("Infinity", False),
        ("-Infinity", False),
        ("01", False),
        ("+1", False),
        (".5", False),
        ("0x10", False),
    ],
)
def test_numbers_are_those_of_64_bits(literal: str, allowed: bool) -> None:
    value = b'{"a":' + literal.encode() + b"}"
    assert (answer(lambda v: strict_json.decode(v)[0], value) != "malformed") == allowed
    assert_same_answers(value)


@given(st.binary(max_size=30))
def test_what_is_said_of_malformed_bytes_quotes_none_of_them(noise: bytes) -> None:
    secret = b'"canary-8d2f'
    for value in (secret + noise.replace(b'"', b"'"), b'{"a":' + secret, noise + secret):
        with pytest.raises(strict_json.MalformedJsonError) as caught:
            strict_json.decode(value)
        assert "canary" not in str(caught.value)
        assert caught.value.__cause__ is None
