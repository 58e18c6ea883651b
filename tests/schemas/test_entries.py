"""A stream's entries behave like a dict whose changes count only once they are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.entries import Entries

NAMES = ("a", "ab", "b", "b/a")
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
        assert list(entries) == sorted(draft)
        for prefix in ("", "a", "b", "b/", "c"):
            assert entries.with_prefix(prefix) == sorted(name for name in draft if name.startswith(prefix))
        assert {name: entries.get(name) for name in NAMES} == {name: draft.get(name) for name in NAMES}
        assert entries.stored() == kept


def test_what_a_fold_writes_while_it_goes_through_the_keys_does_not_change_them() -> None:
    entries = Entries({"m/1": b"", "m/2": b"", "x": b""})
    for key in entries.with_prefix("m/"):
        entries.delete(key)
        entries.put(f"{key}/again", b"")
    assert entries.with_prefix("m/") == ["m/1/again", "m/2/again"]
