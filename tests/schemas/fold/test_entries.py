"""A stream's entries behave like a dict whose changes count once they are kept, wherever they are stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.fold import entries as entries_module
from schemas.fold.entries import Entries, EntriesInMemory, StructEntries, Writes

NAMES = ("a", "ab", "b", "b/a", "b/b", "b/c", "id/1", "id/2")
PREFIXES = ("", "a", "b", "b/", "c", "id/")
KEYS = st.sampled_from(NAMES)
STEPS = st.lists(
    st.tuples(st.just("put"), KEYS, st.binary(max_size=2))
    | st.tuples(st.just("delete"), KEYS, st.just(b""))
    | st.tuples(st.sampled_from(("keep", "drop", "take")), st.just(""), st.just(b""))
    | st.tuples(st.just("look"), st.sampled_from(PREFIXES), st.integers(1, 5).map(bytes)),
    max_size=25,
)
Made = tuple[Entries, Callable[[Writes], None]]


def in_memory(stored: dict[str, bytes]) -> Made:
    """Entries that keep all in memory, and how the caller stores changes: not at all."""
    return Entries(stored), lambda writes: None


def over_a_source(stored: dict[str, bytes]) -> Made:
    """Entries over a store, and how the caller stores changes there."""
    source = EntriesInMemory(stored)

    def store(writes: Writes) -> None:
        for key, value in writes.items():
            source.put(key, value)

    class Store:
        get, keys = staticmethod(source.get), staticmethod(source.keys)

    return Entries(source=Store()), store


@pytest.mark.requirement("ST-11")
@pytest.mark.parametrize("make", [in_memory, over_a_source])
@given(stored=st.dictionaries(KEYS, st.binary(max_size=2)), steps=STEPS, page=st.integers(1, 4))
def test_entries_are_a_dict_with_a_draft(
    make: Callable[[dict[str, bytes]], Made],
    stored: dict[str, bytes],
    steps: list[tuple[str, str, bytes]],
    page: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries_module, "_FIRST_READ", page)
        entries, store = make(stored)
        kept, draft, taken = dict(stored), dict(stored), dict(stored)
        for what, key, value in steps:
            if what == "put":
                entries.put(key, value)
                draft[key] = value
            elif what == "delete":
                entries.delete(key)
                draft.pop(key, None)
            elif what == "keep":
                entries.keep()
                kept = dict(draft)
            elif what == "drop":
                entries.drop()
                draft = dict(kept)
            elif what == "look":
                near = sorted(name for name in draft if name.startswith(key))
                found = itertools.islice(entries.with_prefix(key), len(value))
                assert list(found) == near[: len(value)], "as far as one looks"
            else:
                writes = entries.take_writes()
                for name, written in writes.items():
                    taken = {k: v for k, v in taken.items() if k != name} | (
                        {} if written is None else {name: written}
                    )
                store(writes)
                assert taken == kept, "the writes taken so far lead to what is stored"
            assert {name: entries.get(name) for name in NAMES} == {name: draft.get(name) for name in NAMES}
        for prefix in PREFIXES:
            near = sorted(name for name in draft if name.startswith(prefix))
            assert list(entries.with_prefix(prefix)) == near
        if make is in_memory:
            assert entries.stored() == kept


def test_what_a_fold_writes_while_it_goes_through_the_keys_does_not_change_them() -> None:
    entries = Entries({"m/1": b"", "m/2": b"", "x": b""})
    for key in entries.with_prefix("m/"):
        entries.delete(key)
        entries.put(f"{key}/again", b"")
    assert list(entries.with_prefix("m/")) == ["m/1/again", "m/2/again"]


class Count(msgspec.Struct, array_like=True):
    """A struct that a fold changes."""

    n: int


COUNT = StructEntries("count", Count)


def test_a_struct_is_decoded_once_and_encoded_when_the_writes_are_taken() -> None:
    entries = Entries({"count": msgspec.msgpack.encode(Count(1))})
    for n in (2, 3):
        found = COUNT.read(entries)
        assert found is not None
        found.n = n
        COUNT.write(entries, found)
        entries.keep()
        assert COUNT.read(entries) is found
    assert entries.get("count") == msgspec.msgpack.encode(Count(3))
    assert entries.take_writes() == {"count": msgspec.msgpack.encode(Count(3))}
    assert COUNT.read(entries) == Count(3)


def test_a_change_of_a_struct_that_is_dropped_is_undone() -> None:
    entries = Entries({"count": msgspec.msgpack.encode(Count(1))})
    for prepare in (lambda: None, lambda: (COUNT.write(entries, Count(1)), entries.keep(), entries.encode())):
        prepare()
        found = COUNT.read(entries)
        assert found is not None
        found.n = 9
        COUNT.write(entries, found)
        entries.drop()
        assert COUNT.read(entries) == Count(1)
