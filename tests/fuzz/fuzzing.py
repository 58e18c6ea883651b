"""Runs a fuzzer: a few examples with all tests, as many as a time allows in the long run.

    @fuzzed(mutated(GOOD))
    def test_that_no_bytes_do_this(case: bytes) -> str:
        ...
        return "refused"

The function is asked about one case and says what became of it. A fuzzer that sees only one answer is none: it
shows rubbish to a parser that refuses rubbish; `wanted` names those that must come. Each case may take `CASE_S`
of the processor's time.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The time of each fuzzer in the long run: `TRUNKLINE_FUZZ_S=600 ./trunkline test -m slow tests/fuzz`.
FUZZ_S: Final = float(os.environ.get("TRUNKLINE_FUZZ_S", "60"))
EXAMPLES: Final = 60
CASE_S: Final = 2.0
_AT_ONCE: Final = 500
Case = TypeVar("Case")
Answer = TypeVar("Answer")

# Bytes that parsers stumble over; a mutation inserts them anywhere.
_TOKENS: Final = (
    *(bytes([character]) for character in b"\0\xff\n \t\x85{}[]\"'\\,:/#+%=&<>"),
    *(b"\xc0\xaf", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[2J", b"\r\n", b"../"),
    *(b"\\ud800", b"\\u0000", b"\\u202e", "\u202e\u2028".encode(), "\uff12\u0661".encode(), b"\xb2"),
    *(b"0", b"-0", b"-1", b"1e999", b"1.5", b"NaN", b"Infinity", b"null", b"true", b"9" * 30, b"9" * 5000),
    *(
        b"[" * 3000,
        b'{"a":' * 3000,
        b"x" * 200,
        b'"schema_version":1,',
        b"!!int ''",
        b"!!timestamp x",
        b"&a ",
        b"*a",
    ),
)
_EDIT: Final = st.tuples(
    st.integers(0, 2**20), st.integers(0, 12), st.sampled_from(_TOKENS) | st.binary(max_size=4) | st.just(b"")
)
_COPY: Final = st.tuples(st.integers(0, 2**20), st.integers(0, 2**20), st.integers(1, 60))
JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from((-1, 0, 1, 2**63, 10**40))
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(("", "../x", "a/b", "\x1b[2J", "\u202ex", "x" * 300, "#", "\ufffd", "1")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_CHANGE: Final = st.tuples(st.integers(0, 2**20), st.sampled_from(("set", "delete", "add")), JSON)
_NOTATIONS: Final[tuple[Callable[[Any], str], ...]] = (
    lambda document: json.dumps(document, separators=(",", ":")),
    lambda document: json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False),
    lambda document: json.dumps(document, indent=1),
)


def _edited(parts: tuple[bytes, list[tuple[int, int, bytes]], list[tuple[int, int, int]]]) -> bytes:
    seed, edits, copies = parts
    found = seed
    for at, length, put in edits:
        place = at % (len(found) + 1)
        found = found[:place] + put + found[place + length :]
    for source, target, length in copies:
        start, place = source % (len(found) + 1), target % (len(found) + 1)
        found = found[:place] + found[start : start + length] + found[place:]
    return found


def mutated(*seeds: bytes) -> st.SearchStrategy[bytes]:
    """A good input as it is, with parts cut out, put in, overwritten or doubled; now and then only rubbish."""
    seed = st.sampled_from(seeds)
    edited = st.tuples(seed, st.lists(_EDIT, max_size=4), st.lists(_COPY, max_size=1)).map(_edited)
    return st.one_of(edited, edited, seed, st.binary(max_size=80))


def mutated_text(*seeds: str) -> st.SearchStrategy[str]:
    """As `mutated`, of text as a header brings it: each byte is a character."""
    return mutated(*(seed.encode("latin-1") for seed in seeds)).map(lambda raw: raw.decode("latin-1"))


def _paths(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for name, value in items if isinstance(document, dict | list) else ():
        found.append((*at, name))
        if isinstance(value, dict | list):
            found += _paths(value, (*at, name))
    return found


def _changed(parts: tuple[Any, list[tuple[int, str, Any]]]) -> Any:
    document, changes = json.loads(json.dumps(parts[0])), parts[1]
    for number, how, value in changes:
        paths = _paths(document)
        if not paths:
            break
        *above, last = paths[number % len(paths)]
        node = document
        for name in above:
            node = node[name]
        if how == "delete":
            del node[last]
        elif how == "add" and isinstance(node, dict):
            node[f"{last}x"] = value
        else:
            node[last] = value
    return document


def changed_documents(*documents: Any) -> st.SearchStrategy[Any]:
    """A good document as it is, or with some of its values set, removed or added."""
    return st.tuples(st.sampled_from(documents), st.lists(_CHANGE, max_size=3)).map(_changed)


def _nested(parts: tuple[Any, int]) -> bytes:
    document, depth = parts
    text, deep = json.dumps(document, separators=(",", ":")), "[" * depth + "]" * depth
    return f'{text[:-1]},"deep":{deep}}}'.encode() if isinstance(document, dict) and document else deep.encode()


def mutated_json(*documents: Any) -> st.SearchStrategy[bytes]:
    """JSON of changed documents, in any notation, with more in them than a recursion takes, and the same with
    its bytes mutated.
    """
    written = st.tuples(changed_documents(*documents), st.sampled_from(_NOTATIONS)).map(
        lambda parts: parts[1](parts[0]).encode("utf-8", "surrogatepass")
    )
    good = mutated(
        *(json.dumps(document, separators=(",", ":"), sort_keys=True).encode() for document in documents)
    )
    deep = st.tuples(st.sampled_from(documents), st.sampled_from((100, 3000, 50_000))).map(_nested)
    return st.one_of(written, written, good, good, deep)


def other_numbers(document: Any) -> st.SearchStrategy[bytes]:
    """JSON of `document` with another one in the place of one of its numbers, as often out of all bounds."""
    places = [path for path in _paths(document) if type(_value_at(document, path)) is int]
    huge = st.sampled_from((-1, 2**31, 2**62 + 1, 2**63 - 1, 2**63, 2**64, 10**30))
    return st.tuples(st.sampled_from(places), huge | st.integers(0, 1000)).map(
        lambda parts: _with_number(document, *parts)
    )


def _value_at(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


def _with_number(document: Any, path: tuple[Any, ...], number: int) -> bytes:
    copy = json.loads(json.dumps(document))
    _value_at(copy, path[:-1])[path[-1]] = number
    return json.dumps(copy, separators=(",", ":"), sort_keys=True).encode()


def awaited(work: Awaitable[Answer]) -> Answer:
    """The result of a coroutine that ends by itself: nothing in it waits for anybody."""

    async def run() -> Answer:
        return await work

    return asyncio.run(run())


def fuzzed(
    cases: st.SearchStrategy[Case], examples: int = EXAMPLES, wanted: Sequence[str] = ()
) -> Callable[[Callable[[Case], str]], Any]:
    """Make a test of a function that says what became of one case; it fails by what it raises, and when one of
    the answers `wanted` is given to no case.
    """

    def decorate(check: Callable[[Case], str]) -> Any:
        answers: Counter[str] = Counter()

        def timed(case: Case) -> None:
            began = time.thread_time()
            try:
                answers[check(case)] += 1
                assert time.thread_time() - began < CASE_S
            except BaseException as error:
                error.add_note(f"case: {case!r}"[:2000])
                raise

        def run(count: int, **more: Any) -> None:
            quiet = settings(
                max_examples=count,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                **more,
            )
            quiet(given(cases)(timed))()

        def test(budget_s: float) -> None:
            answers.clear()
            began = time.monotonic()
            if budget_s == 0:
                # The same cases each time: what it finds today it does not lose tomorrow.
                run(examples, derandomize=True)
            while time.monotonic() - began < budget_s:
                run(_AT_ONCE)
            print(f"{check.__name__}: {answers.total()} cases, {dict(answers.most_common())}")
            assert len(answers) > 1, f"all cases had one answer: {dict(answers)}"
            assert set(wanted) <= answers.keys(), f"none was {set(wanted) - answers.keys()}: {dict(answers)}"

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        return _few_or_long(test)

    return decorate


def _few_or_long(test: Callable[..., None]) -> Any:
    long = pytest.param(FUZZ_S, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(FUZZ_S + 240)])
    return pytest.mark.parametrize("budget_s", [pytest.param(0.0, id="few"), long])(test)


def within(document: bytes, limit_s: float, readers: Sequence[Callable[[bytes], object]]) -> None:
    """Show one document to parsers that neither raise nor take longer than this, of the processor's time."""
    for reader in readers:
        began = time.thread_time()
        reader(document)
        spent = time.thread_time() - began
        assert spent < limit_s, f"{getattr(reader, '__name__', reader)} took {spent:.1f} s"
