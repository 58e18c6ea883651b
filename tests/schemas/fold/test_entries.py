"""A stream's entries behave like a dict whose changes count only once they are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.fold.entries import Entries

NAMES = ("a", "ab", "b", "b/a", "id/1", "id/2")
KEYS = st.sampled_from(NAMES)
STEPS = st.lists(
    st.tuples(st.just("put"), KEYS, st.binary(max_size=2))
    | st.tuples(st.just("delete"), KEYS, st.just(b""))
    | st.tuples(st.sampled_from(("keep", "drop", "take")), st.just(""), st.just(b"")),
    max_size=25,
)


@given(st.dictionaries(KEYS, st.binary(max_size=2)), STEPS)
def test_entries_are_a_dict_with_a_draft(stored: dict[str, bytes], steps: list[tuple[str, str, bytes]]) -> None:
    entries, kept, draft = Entries(dict(stored)), dict(stored), dict(stored)
    taken = dict(stored)
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
        else:
            for name, written in entries.take_writes().items():
                taken = {k: v for k, v in taken.items() if k != name} | (
                    {} if written is None else {name: written}
                )
            assert taken == kept, "the writes taken so far lead to what is stored"
        near = sorted(name for name in draft if not name.startswith("id/"))
        for prefix in ("", "a", "b", "b/", "c", "id/"):
            assert list(entries.with_prefix(prefix)) == [name for name in near if name.startswith(prefix)]
        assert {name: entries.get(name) for name in NAMES} == {name: draft.get(name) for name in NAMES}
        assert entries.stored() == kept


def test_what_a_fold_writes_while_it_goes_through_the_keys_does_not_change_them() -> None:
    entries = Entries({"m/1": b"", "m/2": b"", "x": b""})
    for key in entries.with_prefix("m/"):
        entries.delete(key)
        entries.put(f"{key}/again", b"")
    assert list(entries.with_prefix("m/")) == ["m/1/again", "m/2/again"]


def test_a_copy_changes_nothing_of_what_it_was_made_from() -> None:
    entries = Entries({"m/1": b"", "id/1": b""})
    copy = entries.copy()
    for name in ("m/2", "id/2"):
        copy.put(name, b"")
    copy.keep()
    assert set(copy.stored()) == {"m/1", "m/2", "id/1", "id/2"}
    assert (set(entries.stored()), list(entries.with_prefix("m/"))) == ({"m/1", "id/1"}, ["m/1"])


def test_an_entry_that_is_loaded_late_is_found_too() -> None:
    entries = Entries({"m/1": b""})
    assert list(entries.with_prefix("m/")) == ["m/1"]
    entries.load("m/0", b"")
    assert (list(entries.with_prefix("m/")), entries.take_writes()) == (["m/0", "m/1"], {})
