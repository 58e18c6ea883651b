"""The memory of a sender's seqs: it equals one that is a single map, and writes little of itself at once."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold import memories
from schemas.fold.entries import Entries, StructEntries
from schemas.fold.memories import DIGESTS_KEPT, SeqChunk, SeqMemory

MEMORY = StructEntries("memory", SeqMemory)
CHUNKS = StructEntries("seqs/", SeqChunk)


class OneMap:
    """The memory of fold version 9: all digests in one map."""

    def __init__(self, kept: int) -> None:
        self.kept, self.floor, self.last = kept, 0, 0
        self.digests: dict[int, bytes] = {}

    def seen(self, seq: int, digest: bytes) -> str:
        if seq > self.last:
            return "new"
        if seq in self.digests:
            return "same" if self.digests[seq] == digest else "other"
        if seq <= self.floor:
            return "same"
        return "too_old" if len(self.digests) >= self.kept and seq < min(self.digests) else "new"

    def add(self, seq: int, digest: bytes) -> None:
        self.digests[seq] = digest
        if len(self.digests) > self.kept:
            del self.digests[min(self.digests)]
        while self.floor + 1 in self.digests:
            self.floor += 1
        self.last = max(self.last, seq)

    def stored(self) -> dict[str, bytes]:
        """The entry of version 9."""
        return {"memory": msgspec.msgpack.encode([self.floor, self.last, self.digests])} if self.last else {}


def seen(entries: Entries, seq: int, digest: bytes) -> str:
    return (MEMORY.read(entries) or SeqMemory()).seen(seq, digest, entries, CHUNKS)


def add(entries: Entries, seq: int, digest: bytes) -> dict[str, bytes | None]:
    """Remember a seq, and return what was written."""
    memory = MEMORY.read(entries) or SeqMemory()
    memory.add(seq, digest, entries, CHUNKS)
    MEMORY.write(entries, memory)
    entries.keep()
    return entries.take_writes()


def assert_equal(entries: Entries, one_map: OneMap, seq: int, digest: bytes) -> None:
    """Both say the same of a seq, and remember it if it is new."""
    said = one_map.seen(seq, digest)
    assert seen(entries, seq, digest) == said
    if said == "new":
        add(entries, seq, digest)
        one_map.add(seq, digest)
        memory = MEMORY.read(entries)
        assert memory is not None
        assert (memory.floor, memory.last) == (one_map.floor, one_map.last)
        assert memory.moved + len(memory.digests) == len(one_map.digests)


SEQS = st.integers(1, 12) | st.integers(1, 60) | st.integers(2**62, 2**62 + 5)


@pytest.mark.requirement("ST-10")
@given(
    st.lists(st.tuples(SEQS, st.sampled_from([b"1", b"2"])), max_size=60),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 60),
)
@settings(max_examples=300, deadline=None)
def test_it_says_and_forgets_what_one_map_does(
    sent: list[tuple[int, bytes]], kept: int, inside: int, width: int, switched_after: int
) -> None:
    entries, one_map = Entries(), OneMap(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "DIGESTS_KEPT", kept)
        patch.setattr(memories, "DIGESTS_INSIDE", max(inside, width))
        patch.setattr(memories, "SEQS_IN_A_CHUNK", width)
        for number, (seq, digest) in enumerate(sent):
            if number == switched_after:
                entries = Entries(one_map.stored())
            assert_equal(entries, one_map, seq, digest)


@pytest.mark.requirement("ST-10")
@pytest.mark.parametrize("disorder", [0, 3, 40, 700])
def test_thousands_of_seqs_in_any_order_are_told_apart_as_by_one_map(disorder: int) -> None:
    draw, entries, one_map = random.Random(disorder), Entries(), OneMap(DIGESTS_KEPT)
    for number in range(1, 2500):
        seq = max(1, number + draw.randint(-disorder, disorder))
        assert_equal(entries, one_map, seq, bytes([draw.random() < 0.01]))


@pytest.mark.requirement("ST-10")
@pytest.mark.parametrize("step", [1, 1000])
def test_a_seq_writes_as_much_after_thousands_of_others_as_after_a_hundred(step: int) -> None:
    entries = Entries()
    sizes = [
        sum(len(key) + len(value or b"") for key, value in add(entries, n * step, bytes(16)).items())
        for n in range(1, 3000)
    ]
    assert sum(sizes[-100:]) < 1.4 * sum(sizes[:100])
    assert max(sizes) < 1000
    assert len(entries.stored()) <= (20 if step == 1 else DIGESTS_KEPT)


@pytest.mark.requirement("ST-13")
def test_a_memory_of_version_9_is_moved_into_chunks_by_the_next_seq() -> None:
    one_map = OneMap(DIGESTS_KEPT)
    for seq in range(1, 600):
        one_map.add(seq, bytes(16))
    entries = Entries(one_map.stored())
    assert seen(entries, 599, bytes(16)) == seen(entries, 5, b"") == "same"
    assert seen(entries, 344, b"") == "other"
    add(entries, 600, bytes(16))
    assert [seen(entries, seq, b"") for seq in (344, 345, 600)] == ["same", "other", "other"]
    assert len(add(entries, 601, bytes(16))) <= 3
    assert len(entries.stored()["memory"]) < 400
