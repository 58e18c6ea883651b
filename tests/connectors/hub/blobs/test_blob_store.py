"""The objects of blobs (DL-25): whole or not there, and no draft remains.

A store at a URI is a folder here, too, but is reached by the client of object stores, in all its steps.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import resource
import time
from pathlib import Path

import pytest

from connectors.hub.blobs.blob_store import BlobMissing, BlobStore
from connectors.operations.blobs.blobs import OpenBlob
from schemas.streams.blob.blobs import BlobReference
from tests.s3_server import ObjectStore

pytestmark = pytest.mark.requirement("DL-25")

# Longer than the parts in which an object is written.
GIVEN = b"stars" * 500_000


@pytest.fixture(params=["folder", "uri"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> BlobStore:
    """A store. Its folder does not exist yet, unless it is reached by a URI."""
    folder = tmp_path / "tables" / "_blobs"
    if request.param == "folder":
        return BlobStore(str(folder), tmp_path / "uploads")
    folder.mkdir(parents=True)
    return BlobStore(folder.as_uri(), tmp_path / "uploads")


def kept(store: BlobStore, given: bytes = GIVEN) -> str:
    """Store a content; the name of its object."""
    draft = store.new_draft()
    try:
        for at in range(0, len(given), 1024 * 1024):
            draft.write(given[at : at + 1024 * 1024])
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


def test_a_draft_becomes_an_object_as_a_whole(store: BlobStore, tmp_path: Path) -> None:
    name = kept(store)
    assert name.startswith(f"{hashlib.sha256(GIVEN).hexdigest()}.")
    assert store.size(name) == len(GIVEN)
    with store.open(name, len(GIVEN)) as file:
        assert file.read() == GIVEN
    assert files_of(tmp_path) == [name]
    assert kept(store) != name


@pytest.mark.requirement("DP-15")
def test_an_object_of_s3_is_whole_or_not_there(s3: ObjectStore, tmp_path: Path) -> None:
    store = BlobStore(f"s3://{s3.bucket}/_blobs", tmp_path / "uploads")
    content = os.urandom(12 * 1024 * 1024)  # more than one part of an upload
    name = kept(store, content)
    assert store.size(name) == len(content) and store.is_whole(name, len(content))
    with store.open(name, len(content)) as file:
        assert file.read() == content
    assert files_of(tmp_path) == []
    assert store.strangers(-60, set().__contains__) == [name] and not store.strangers(-60, {name}.__contains__)
    store.delete(name)
    store.delete(name)
    assert store.size(name) is None
    s3.fail(refused=1)
    with pytest.raises(OSError):
        kept(store)


def test_a_draft_that_is_closed_leaves_nothing(store: BlobStore, tmp_path: Path) -> None:
    draft = store.new_draft()
    draft.write(GIVEN)
    assert len(files_of(tmp_path)) == 1
    draft.close()
    draft.close()
    assert files_of(tmp_path) == []


def test_a_missing_object_or_one_of_another_length_is_not_opened(store: BlobStore, tmp_path: Path) -> None:
    name = kept(store)
    for wanted, size in ((f"{name}0", len(GIVEN)), (name, len(GIVEN) + 1)):
        with pytest.raises(BlobMissing):
            store.open(wanted, size)
    store.delete(name)
    store.delete(name)
    assert store.size(name) is None


@pytest.mark.parametrize("size", [1, 1024 * 1024, 3 * 1024 * 1024 + 1])
def test_the_last_part_of_a_damaged_object_is_kept_back(size: int) -> None:
    given, damage = bytes(size), list[str]()

    async def read(digest: str) -> bytes:
        reference = BlobReference(digest=digest, bytes=size, content_type="text/plain")
        blob = OpenBlob(reference, io.BytesIO(given), lambda: damage.append(digest))
        found = b""
        try:
            async for part in blob.parts():
                found += part
        except OSError:
            assert digest == "ab" * 32
        return found

    assert asyncio.run(read(hashlib.sha256(given).hexdigest())) == given
    assert damage == []
    assert len(asyncio.run(read("ab" * 32))) < size
    assert damage == ["ab" * 32]


@pytest.mark.requirement("DL-26")
def test_old_strangers_and_old_drafts_are_found(store: BlobStore, tmp_path: Path) -> None:
    assert store.strangers(0, set().__contains__) == []
    known, strange, fresh = (kept(store) for _ in range(3))
    for name in (known, strange):
        age(tmp_path / "tables" / "_blobs" / name, 100)
    (other := tmp_path / "tables" / "_blobs" / "a file of somebody").write_text("not ours")
    age(other, 100)
    draft = store.new_draft()
    assert store.strangers(60, {known, fresh}.__contains__) == [strange]
    assert store.delete_drafts(60) == 0
    age(draft.path, 100)
    assert store.delete_drafts(60) == 1
    draft.close()
    assert files_of(tmp_path) == sorted((known, strange, fresh, other.name))


def test_a_draft_that_a_full_disk_does_not_take_is_deleted_without_a_further_error(store: BlobStore) -> None:
    draft = store.new_draft()
    draft.write(b"in memory")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError):
            draft.sync()
        draft.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not draft.path.exists()
