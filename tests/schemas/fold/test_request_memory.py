"""The memory of a stream's requests: it tells new, same and other apart, and writes little at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold import memories
from schemas.fold.entries import Entries, StructEntries
from schemas.fold.memories import REQUESTS_KEPT, RequestChunk, RequestMemory, content_digest
from tests.schemas.fold.memory_cases import request

BODIES = st.dictionaries(st.sampled_from("ab"), st.integers(0, 1), max_size=2)
MEMORY = StructEntries("memory", RequestMemory)
CHUNKS = StructEntries("older/", RequestChunk)


def seen(entries: Entries, ce_id: str, body: dict[str, Any]) -> str:
    memory = MEMORY.read(entries) or RequestMemory()
    return memory.seen(request(ce_id, body, entries), CHUNKS)


def add(entries: Entries, ce_id: str, body: dict[str, Any]) -> dict[str, bytes | None]:
    """Remember a request, and return what was written."""
    memory = MEMORY.read(entries) or RequestMemory()
    memory.add(request(ce_id, body, entries), CHUNKS)
    MEMORY.write(entries, memory)
    entries.keep()
    return entries.take_writes()


def of_version_9(known: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    """The entry as fold version 9 stored it: all digests in one value."""
    made = Entries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "REQUESTS_INSIDE", 1 << 30)
        for ce_id, body in known.items():
            add(made, ce_id, body)
    ((key, raw),) = made.stored().items()
    digests, moved = msgspec.msgpack.decode(raw)
    assert moved == 0
    return {key: msgspec.msgpack.encode([digests])}


@pytest.mark.requirement("ST-10")
@given(
    st.lists(st.tuples(st.sampled_from("uvwxyz\u00e9"), BODIES), max_size=40),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_the_newest_requests_are_known_and_older_ones_are_new_again(
    asked: list[tuple[str, dict[str, Any]]], kept: int, inside: int, switched_after: int
) -> None:
    kept = max(kept, inside)
    entries, known = Entries(), dict[str, dict[str, Any]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "REQUESTS_KEPT", kept)
        patch.setattr(memories, "REQUESTS_INSIDE", inside)
        patch.setattr(memories, "REQUEST_CHUNKS", 3)
        for number, (ce_id, body) in enumerate(asked):
            if number == switched_after:
                entries = Entries(of_version_9(known) if known else {})
            expected = "new" if ce_id not in known else "same" if known[ce_id] == body else "other"
            assert seen(entries, ce_id, body) == expected
            if expected == "new":
                add(entries, ce_id, body)
                known = dict([*known.items(), (ce_id, body)][-kept:])


@pytest.mark.requirement("ST-10")
def test_a_request_writes_as_much_after_thousands_of_others_as_after_a_hundred() -> None:
    entries = Entries()
    sizes = [
        sum(len(key) + len(value or b"") for key, value in add(entries, f"{n}" * 50, {"n": n}).items())
        for n in range(3000)
    ]
    assert sum(sizes[-100:]) < 1.6 * sum(sizes[:100]) < 1.6 * 100 * 500
    assert max(sizes[300:]) < 4000
    assert REQUESTS_KEPT == 256
    assert seen(entries, "2743" * 50, {}) == "new"
    assert seen(entries, "2744" * 50, {"n": 2744}) == "same"
    assert sum(map(len, entries.stored().values())) < 20_000


@pytest.mark.requirement("ST-13")
def test_a_memory_of_version_9_is_moved_into_chunks_by_the_next_request() -> None:
    known = {f"r{n}": {"n": n} for n in range(REQUESTS_KEPT)}
    entries = Entries(of_version_9(known))
    assert [seen(entries, ce_id, body) for ce_id, body in known.items()] == ["same"] * REQUESTS_KEPT
    assert len(add(entries, "new", {})) > 32
    assert seen(entries, "r0", {"n": 0}) == "new"
    assert [seen(entries, f"r{n}", {"n": n}) for n in range(1, REQUESTS_KEPT)] == ["same"] * (REQUESTS_KEPT - 1)
    assert seen(entries, "r7", {}) == "other"
    assert len(add(entries, "newer", {})) == 1
    assert len(entries.stored()["memory"]) < 600


def test_two_memories_share_nothing() -> None:
    one, other = RequestMemory(), RequestMemory()
    one.add(request("a", {}, Entries()), CHUNKS)
    assert other.seen(request("a", {}, Entries()), CHUNKS) == "new"


def test_the_digest_is_of_the_content_and_not_of_its_notation() -> None:
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})
    assert content_digest({"a": 1}) != content_digest({"a": "1"})
    assert len(content_digest({})) == 16
