"""The objects of blobs in a local folder (DL-25): whole or not there, and no draft remains."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from connectors.gateway.blobs.blob_store import BlobMissing, BlobStore

pytestmark = pytest.mark.requirement("DL-25")

GIVEN = b"stars" * 1000


def store_in(folder: Path) -> BlobStore:
    """A store whose folder does not exist yet."""
    return BlobStore(str(folder / "tables" / "_blobs"), folder / "uploads")


def kept(store: BlobStore, given: bytes = GIVEN) -> str:
    """Store a content; the name of its object."""
    draft = store.new_draft()
    try:
        draft.write(given[:7])
        draft.write(given[7:])
        return store.keep(draft)
    finally:
        draft.close()


def files_of(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def age(path: Path, seconds: float) -> None:
    """Make a file older."""
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def test_a_draft_becomes_an_object_as_a_whole(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    name = kept(store)
    assert name.startswith(f"{hashlib.sha256(GIVEN).hexdigest()}.")
    assert store.size(name) == len(GIVEN)
    with store.open(name, len(GIVEN)) as file:
        assert file.read() == GIVEN
    assert files_of(tmp_path) == [name]
    assert kept(store) != name


def test_a_draft_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    draft = store.new_draft()
    draft.write(GIVEN)
    assert len(files_of(tmp_path)) == 1
    draft.close()
    draft.close()
    assert files_of(tmp_path) == []


def test_a_missing_object_or_one_of_another_length_is_not_opened(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    name = kept(store)
    for wanted, size in ((f"{name}0", len(GIVEN)), (name, len(GIVEN) + 1)):
        with pytest.raises(BlobMissing):
            store.open(wanted, size)
    store.delete(name)
    store.delete(name)
    assert store.size(name) is None


@pytest.mark.requirement("DL-26")
def test_old_strangers_and_old_drafts_are_found(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.strangers(0, set().__contains__) == []
    known, strange, fresh = (kept(store) for _ in range(3))
    for name in (known, strange):
        age(Path(store.root) / name, 100)
    draft = store.new_draft()
    assert store.strangers(60, {known, fresh}.__contains__) == [strange]
    assert store.delete_drafts(60) == 0
    age(draft.path, 100)
    assert store.delete_drafts(60) == 1
    draft.close()
    assert files_of(tmp_path) == sorted((known, strange, fresh))
