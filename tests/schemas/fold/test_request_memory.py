"""The memory of a stream's requests: it tells new, same and other apart, and stays as small as it says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold import memories
from schemas.fold.memories import REQUESTS_KEPT, RequestMemory, content_digest

BODIES = st.dictionaries(st.sampled_from("ab"), st.integers(0, 1), max_size=2)


@given(st.lists(st.tuples(st.sampled_from("uvwxyz\u00e9"), BODIES), max_size=30), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_the_newest_requests_are_known_and_older_ones_are_new_again(
    asked: list[tuple[str, dict[str, Any]]], kept: int
) -> None:
    memory, known = RequestMemory(), dict[str, dict[str, Any]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "REQUESTS_KEPT", kept)
        for ce_id, body in asked:
            expected = "new" if ce_id not in known else "same" if known[ce_id] == body else "other"
            assert memory.seen(ce_id, body) == expected
            if expected == "new":
                memory.add(ce_id, body)
                known = dict([*known.items(), (ce_id, body)][-kept:])
            memory = msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=RequestMemory)


def test_256_requests_are_kept_in_a_few_kibibytes_whatever_their_ids_and_bodies() -> None:
    memory = RequestMemory()
    for n in range(1000):
        memory.add(f"{n}" * 100, {"reason": "x" * 500, "n": n})
    assert len(memory.digests) == REQUESTS_KEPT == 256
    assert len(msgspec.msgpack.encode(memory)) < 10_000
    assert memory.seen("743" * 100, {}) == "new"
    assert memory.seen("744" * 100, {"n": 744, "reason": "x" * 500}) == "same"


def test_two_memories_share_nothing() -> None:
    one, other = RequestMemory(), RequestMemory()
    one.add("a", {})
    assert other.seen("a", {}) == "new"


def test_the_digest_is_of_the_content_and_not_of_its_notation() -> None:
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})
    assert content_digest({"a": 1}) != content_digest({"a": "1"})
    assert len(content_digest({})) == 16
