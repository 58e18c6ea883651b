"""A stream's entries behave like a dict whose changes count only once they are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.entries import Entries

KEYS = st.sampled_from("abc")
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
        assert list(entries) == sorted(draft)
        assert {name: entries.get(name) for name in "abc"} == {name: draft.get(name) for name in "abc"}
        assert entries.stored() == kept
